"""HostRows whose flags are late."""

import random
import time

from vitkernels.parallel.host_memory import HostRows


class Late(HostRows):
    """Ranks that say at random moments what they have done, and learn at others what the others have."""

    def __init__(self, *args):
        super().__init__(*args)
        self._chance, self.most = random.Random(self.rank), 0.005  # seconds

    def announce(self, *args):
        super().announce(*args)
        self._linger()

    def expect(self, *args):
        super().expect(*args)
        self._linger()

    def _linger(self):
        time.sleep(self._chance.choice([0, 0, 0, self.most]))
