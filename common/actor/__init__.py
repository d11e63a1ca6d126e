"""The shell around every core: a mailbox of events, and a process that serves it."""
