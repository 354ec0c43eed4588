"""Environments: what an author writes (``base``), how it is found, served over HTTP and asked for grades.

::

    base      the class an author derives from
    loader    finds environments by name            config   reads the YAML list that selects them
    data      reads published data sets             scaffold writes a new environment
    server    serves them over loopback HTTP        serving  its routes
    process   keeps that server alive as a child process
    client    asks it for tasks and grades          address  where it listens, and the token it wants

Nothing here imports torch: the server must be up in a fraction of a second.
"""
