"""Your data set and your attention backend. Importing this package registers the backend."""

from mine.attention import Mine
from vitkernels import attention

attention.register("mine", Mine())
