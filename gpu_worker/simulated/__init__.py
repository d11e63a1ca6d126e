"""A device that is only time: it obeys plans on the wall clock by the cost model, and computes nothing.

With it the whole system runs at the pace of a fast GPU on a machine that has none: what is then measured is the
system's own part. Imports no torch and no numpy, and starts in half a second.
"""
