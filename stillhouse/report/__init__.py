"""The report: shows a run's folder as one HTML page that needs only a browser.

`page` fills the template in `assets/` with the content that the other modules prepare. The page contains its style,
its script and the charting library (uPlot, MIT; `assets/` has the licence). Its content security policy forbids all
network requests; only a page that `stillhouse report --watch` serves may send requests, to its own server.
"""
