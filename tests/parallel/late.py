"""SharedHostRows with delayed flags."""

import random
import time

from vitkernels.parallel.host_memory import SharedHostRows


class Late(SharedHostRows):
    """Signal and wait with random delays."""

    def __init__(self, *args):
        super().__init__(*args)
        self._random, self.max_delay = random.Random(self.rank), 0.005  # seconds

    def signal(self, *args):
        super().signal(*args)
        self._delay()

    def wait(self, *args):
        super().wait(*args)
        self._delay()

    def _delay(self):
        time.sleep(self._random.choice([0, 0, 0, self.max_delay]))
