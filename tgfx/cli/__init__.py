"""The command line: `tgfx COMMAND`. One file a command; app.py holds them together."""
