"""Environments: what an author writes (``base``), how it is found, served over HTTP and asked for grades.

::

    base      the class an author derives from      loader   finds environments by name
    config    reads the YAML list of a run          loading  does so in a process that may fail
    data      reads published data sets             grading  compares answers
    client    asks the server for tasks and grades  process  keeps the server alive as a child process
    server    serves them over loopback HTTP        workers  grades in processes that may hang or die (``worker``)
    wire      what these say to each other          results  what came of a sample
    checks    looks at tasks, row by row            selftest whether a grader can be trusted
    child     starts and ends processes             service  what the server does for its routes
    harness   runs one sample of a harness          judging  rewards from a model, alone or by ``ranking`` a group

Nothing here imports torch: the server must be up in a fraction of a second.
"""
