"""From symbolic scalar expressions to compiled loops. Knows operations' names, not operations."""
