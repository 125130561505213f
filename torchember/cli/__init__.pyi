from .commands import command as command, main as main
