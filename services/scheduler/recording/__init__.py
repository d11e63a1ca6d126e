"""The flight recorder: what the core was told and what it answered, on disk, so that any moment can be run again."""
