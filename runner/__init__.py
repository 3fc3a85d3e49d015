"""The program: command line, checks, process groups, timing, files."""

__version__ = "0.1.0"
