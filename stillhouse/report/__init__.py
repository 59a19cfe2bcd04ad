"""The report: shows a run folder as one HTML page that needs only a browser.

`reading` turns the folder's files into typed values, `curves` decides which charts to draw, `held_out` prepares the
text shaded by divergence per token, and `page` fills the template in `assets/`. The page contains its style, its
script and the charting library (uPlot, MIT, licence beside it). Its security policy forbids every network request.
"""

from stillhouse.report.page import write_report

__all__ = ["write_report"]
