"""One paper or family a file; every builder by name."""

from fedbraid.algorithms.adabest import adabest
from fedbraid.algorithms.adaptive import fedadabelief, fedadagrad, fedadam, fedlamb, fedyogi
from fedbraid.algorithms.averaging import fedavg, fedavgm, fednova, fedprox
from fedbraid.algorithms.fedadavr import cluster_fedvarp, fedadavr, fedvarp, mifa
from fedbraid.algorithms.feddyn import feddyn
from fedbraid.algorithms.fedgbo import fedgbo, mfl, mimelite
from fedbraid.algorithms.fedshift import fedshift
from fedbraid.algorithms.links import error_feedback, fedef, fedpaq, hidden_state, with_codecs
from fedbraid.algorithms.qafel import fedasync, fedbuff, qafel
from fedbraid.algorithms.scaffold import scaffold, scaffold_m

BUILDERS = {
    f.__name__: f
    for f in (
        fedavg, fedavgm, fedprox, fednova,
        fedadagrad, fedadam, fedyogi, fedadabelief, fedlamb,
        fedvarp, mifa, cluster_fedvarp, fedadavr,
        scaffold, scaffold_m, feddyn, adabest,
        fedgbo, mimelite, mfl,
        fedpaq, fedef,
        fedbuff, fedasync, qafel,
    )
}  # fmt: skip

WRAPPERS = {f.__name__: f for f in (fedshift, with_codecs, error_feedback, hidden_state)}

__all__ = [
    "BUILDERS",
    "WRAPPERS",
    "adabest",
    "cluster_fedvarp",
    "error_feedback",
    "fedadabelief",
    "fedadagrad",
    "fedadam",
    "fedadavr",
    "fedasync",
    "fedavg",
    "fedavgm",
    "fedbuff",
    "feddyn",
    "fedef",
    "fedgbo",
    "fedlamb",
    "fednova",
    "fedpaq",
    "fedprox",
    "fedshift",
    "fedvarp",
    "fedyogi",
    "hidden_state",
    "mfl",
    "mifa",
    "mimelite",
    "qafel",
    "scaffold",
    "scaffold_m",
    "with_codecs",
]
