"""What a GPU would run, read from the compiled module, without a GPU."""

from jzero.plan.planner import plan, report
from jzero.plan.result import Report
from jzero.plan.search import sweep
from jzero.plan.targets import TARGETS, available, devices

__all__ = ["TARGETS", "Report", "available", "devices", "plan", "report", "sweep"]
