"""The report: a run folder as one HTML page that needs nothing but a browser.

`reading` turns the folder's files into typed values, `curves` decides which charts they make, `held_out` prepares
the text shaded by per-token divergence, and `page` fills the template in `assets/`. Style, script and the charting
library (uPlot, MIT, licence beside it) are written into the page, which forbids itself every network request.
"""

from stillhouse.report.page import write_report

__all__ = ["write_report"]
