"""What `tools/figures` measures with.

    figure.py   one measured value, its bound and its line
    disk.py     files below the page cache: cold reads, fio, a loop device with a given readahead
    cgroup.py   a command under a memory and a read-bandwidth limit
    worker.py   the child process that loads one model and answers token streams with records
    arms.py     starts such children, and the token streams they are fed
    subject.py  the model file: its dense bytes, its KV size, making one of a wanted shape
    engine.py   the figures of the streaming engine
    layout.py   the figures of the laid file
    compute.py  the figures of the computing itself
    competitor.py  a process that keeps a core busy
    zeros.py       the share of zeros behind the gates of experts

Data flows one way: worker -> arms -> engine -> figure's line. Nothing here knows the numbers it should find; only the sets of figures
hold bounds, and every value it prints was measured in that run.
"""
