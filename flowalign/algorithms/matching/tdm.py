"""TDM: trajectory distribution matching, few-step distillation along the ODE (arXiv 2503.06674)."""

from flowalign.algorithms.matching.along_ode import AlongODE


class TDM(AlongODE):
    """TDM: distribution matching at every step of a few-step trajectory (arXiv 2503.06674)."""

    name = "tdm"
