"""Our own C++ kernels for CPUs: a forward pass in one call, as fast as memory for few rows and as products for many.

`source/` is built once for the machine's instruction set (build.py), called through ctypes (library.py), and given
a model's forward pass as a list of operations (program.py). No kernel's result depends, to the bit, on a row's
neighbours, on how a request was cut into chunks, or on the number of threads.
"""
