"""`python -m sweepgrad`: the command line."""

from sweepgrad.cli import main

if __name__ == "__main__":
    main()
