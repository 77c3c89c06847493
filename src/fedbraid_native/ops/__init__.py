"""The operations that native code is made of: one class each, which says its C++ type and emits its two calls."""

# ruff: noqa: F403
from fedbraid_native.ops.base import *
from fedbraid_native.ops.elementwise import *
from fedbraid_native.ops.images import *
from fedbraid_native.ops.linear import *
from fedbraid_native.ops.loss import *
from fedbraid_native.ops.sequence import *
from fedbraid_native.ops.shapes import *
from fedbraid_native.ops.unbatched import *
