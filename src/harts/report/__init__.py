"""Reports: one self-contained HTML page each, of a plan, of a rollout file, of a training run.

They read plans, inspections and metrics files, and import neither torch nor a plotting library.
"""

from harts.report.inspect_report import write_inspect_report
from harts.report.plan_report import write_plan_report
from harts.report.train_report import write_train_report

__all__ = ["write_inspect_report", "write_plan_report", "write_train_report"]
