"""The report: shows a run folder as one HTML page that needs only a browser.

`run_files` reads the folder's files as the types of `output/`. `curves` prepares the charts; `timeline`,
`shown_completions` and `token_text` prepare the other records of a run; `page` fills the template in `assets/`.
`config_differences` compares the runs' configurations, and `watch` serves the page during a run. The page contains
its style, its script and the charting library (uPlot, MIT, licence beside it). Its security policy forbids all
network requests, except that a watched page may send requests to its own server.
"""

from stillhouse.output.report.page import write_report

__all__ = ["write_report"]
