"""The report: shows a run folder as one HTML page that needs only a browser.

`run_files` reads the folder's files as the types of `output/`, `curves` decides which charts to draw, `timeline`,
`shown_completions` and `token_text` prepare what a run recorded, and `page` fills the template in `assets/`.
`differences` compares the runs' configurations, and `watch` serves the page while a run goes on. The page contains
its style, its script and the charting library (uPlot, MIT, licence beside it). Its security policy forbids every
network request; only a watched page may ask the server that it comes from.
"""

from stillhouse.output.report.page import write_report

__all__ = ["write_report"]
