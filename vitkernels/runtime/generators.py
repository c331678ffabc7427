"""The lock of the global random generators of random, numpy and torch (CPU).

Code holds it while it has seeded the generators, or saves or restores their states. On XLA, a thread prepares batches
while the training thread writes a checkpoint.
"""

import threading

GENERATORS = threading.RLock()
