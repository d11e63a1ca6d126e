"""`legato gpu-check`: one script, one call, that says whether a GPU computes rightly and how fast."""
