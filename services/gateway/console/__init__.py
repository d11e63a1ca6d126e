"""The console page, a file of its own."""
