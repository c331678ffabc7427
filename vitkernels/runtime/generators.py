"""The lock of the global random generators of random, numpy and torch (CPU).

Who seeds them for a while holds it, and so does who saves or restores their states. On XLA, a thread prepares batches
while the training thread writes a checkpoint.
"""

import threading

GENERATORS = threading.RLock()
