"""Raises an exception at a chosen point of a run, so that a test can go through all of them."""

import dis
import functools
import sys


@functools.cache
def ends_of_with(code):
    """Where the end of a `with` block begins in `code`, by offset: the line of the `with` comes a second time there.

    No exception can come there but from a tracer, which the interpreter then does not let the block see.
    """
    first, again, before = {}, set(), None
    withs = {i.positions.lineno for i in dis.get_instructions(code) if i.opname == "BEFORE_WITH"}
    for offset, line in dis.findlinestarts(code):
        if line in withs and line != before and first.setdefault(line, offset) != offset:
            again.add(offset)
        before = line
    return again


class Raising:
    """Raises `error` at the `point`-th occasion in the files `where`, and remembers in which function."""

    def __init__(self, where, point, error=KeyboardInterrupt):
        self.files = where
        self.left = point
        self.error = error
        self.where = None

    def occasion(self, frame):
        # What is raised while a generator is closed goes nowhere.
        if frame.f_code.co_filename.startswith(self.files) and frame.f_code.co_name != "<genexpr>":
            self.left -= 1
            if not self.left:
                self.where = frame.f_code.co_name
                raise self.error

    def on_line(self, frame, event, arg):
        if event == "line" and frame.f_lasti not in ends_of_with(frame.f_code):
            self.occasion(frame)
        return self.on_line

    def after_call(self, frame, event, arg):
        if event in ("call", "c_return"):
            self.occasion(frame)

    def run(self, function, install, hook, before):
        install(hook)
        try:
            function()
        except self.error:
            assert self.where is not None, "it was raised by something else"
        finally:
            install(before)
        return self.where

    def by_lines(self, function):
        """On every line."""
        return self.run(function, sys.settrace, self.on_line, sys.gettrace())

    def by_calls(self, function):
        """After each call, where Python looks for signals: within lines too, but fewer lines."""
        return self.run(function, sys.setprofile, self.after_call, sys.getprofile())
