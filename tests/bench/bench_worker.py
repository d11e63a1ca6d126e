"""How near an iteration comes to what the machine can do: `python -m tests.bench.bench_worker`.

For each kind of iteration: its time, the floor that memory and products set, the ratio of the two, the same iteration
on plain torch if asked for, and the operations that the time goes into. Not a test: it asserts nothing. Other processes
make all figures worse, so each is the least of several runs, and the machine's own rates are measured in between; the
floor is by the best of them. Where they differ much, the machine is not quiet and the figures mean little.
"""

from gpu_worker.threads import set_up_threads

if __name__ == "__main__":
    set_up_threads()
    # Torch comes in with it, and must find the threads set up.
    from tests.bench.worker_iterations import main

    main()
