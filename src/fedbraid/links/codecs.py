"""What a vector is turned into before it travels or is stored.

>>> from fedbraid import codecs
>>> codecs.mixed(codecs.uniform(4), share=0.5)
mixed(codec=uniform(bits=4), share=0.5)
"""

from fedbraid.links.fp16 import Fp16 as fp16
from fedbraid.links.identity import Identity as identity
from fedbraid.links.kmeans import Kmeans as kmeans
from fedbraid.links.qsgd import Qsgd as qsgd
from fedbraid.links.shared import Shared as shared
from fedbraid.links.symmetric import Int4 as int4
from fedbraid.links.symmetric import Int8 as int8
from fedbraid.links.topk import Topk as topk
from fedbraid.links.uniform import Uniform as uniform
from fedbraid.links.wrappers import Mixed as mixed
from fedbraid.links.wrappers import OfWeights as of_weights

__all__ = [
    "fp16", "identity", "int4", "int8", "kmeans", "mixed", "of_weights", "qsgd", "shared", "topk", "uniform",
]  # fmt: skip
