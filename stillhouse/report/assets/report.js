// The two interactive parts of the page: charts that share one cursor, and the figures of a held-out token.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const element = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  // ---- numbers

  const short = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
    if (size >= 1e4) return +(value / 1e3).toPrecision(4) + "k";
    if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(+value.toPrecision(4));
  };
  const percent = (share) => (share !== 0 && Math.abs(share) < 0.001 ? "<0.1 %" : (100 * share).toFixed(1) + " %");
  // The labels of an axis, all in the same notation.
  const ticks = (chart) => (plot, values) => {
    const largest = Math.max(...values.map(Math.abs));
    const text = (value) => {
      if (chart.percent) return +(100 * value).toPrecision(6) + " %";
      if (value !== 0 && largest < 0.01) return value.toExponential(1).replace(".0e", "e");
      return short(+value.toPrecision(12));
    };
    return values.map((value) => (value === null ? "" : text(value)));
  };

  // ---- charts

  const plots = [];
  let drawn = 0;

  // The point of a series that is nearest to the cursor. Each series may have values at different steps.
  const nearest = (plot, series, index, at) => {
    const [steps, values] = [plot.data[0], plot.data[series]];
    if (values[index] != null) return index;
    let [left, right] = [index, index];
    while (left >= 0 && values[left] == null) left--;
    while (right < values.length && values[right] == null) right++;
    if (left < 0) return right < values.length ? right : index;
    if (right >= values.length) return left;
    return at - steps[left] <= steps[right] - at ? left : right;
  };

  const legend = (figure, chart) => {
    const labelled = chart.sides.length > 1 || data.runs.length > 1;
    return chart.series.map((series) => {
      const item = element("li");
      if (labelled) {
        const swatch = element("i", "swatch" + (chart.sides.indexOf(series.side) > 0 ? " dashed" : ""));
        swatch.dataset.run = series.run;
        item.append(swatch);
        if (series.side) item.append(element("span", "side", series.side));
        if (data.runs.length > 1) {
          const name = element("span", "run-name", data.runs[series.run]);
          name.title = data.runs[series.run];
          item.append(name);
        }
      }
      const value = element("b");
      item.append(value);
      figure.querySelector(".legend").append(item);
      return value;
    });
  };

  // The x axis has whole steps, the same in every chart. The y axis is as wide as its labels. A logarithmic axis has
  // marks at powers of ten; if it spans less than two of them, also at 2 and 5.
  const lastStep = Math.max(1, ...data.charts.flatMap((chart) => chart.series.map((series) => series.steps.at(-1))));
  const steps = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((power) => [power, 2 * power, 5 * power]);
  const widest = (plot, labels) => 12 + Math.max(3, ...(labels || []).map((label) => label.length)) * 6.3;
  const marked = (plot, splits) => {
    const digits = plot.scales.y.max / plot.scales.y.min < 100 ? [1, 2, 5] : [1];
    return splits.map((value) => (digits.includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9))) ? value : null));
  };

  // A share that never changes has no range of its own: the axis is then from 0 to 100 %.
  const shares = (plot, low, high) => (low === high ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));

  const chartOptions = (plot, chart, onCursor, onDraw) => ({
    width: plot.clientWidth,
    height: plot.clientHeight,
    legend: { show: false },
    padding: [8, 12, 0, 0],
    cursor: { sync: { key: "steps", scales: ["x", null] }, y: false, points: { size: 6 }, dataIdx: nearest },
    scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1, ...(chart.percent && { range: shares }) } },
    axes: [
      { stroke: () => colour("--muted"), grid: { show: false }, ticks: { stroke: () => colour("--rule"), size: 4, width: 1 },
        font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", label: "step", labelSize: 14, labelGap: -2,
        size: 22, gap: 2, space: 55, values: ticks({}), incrs: steps },
      { stroke: () => colour("--muted"), ticks: { show: false },
        grid: { stroke: () => colour("--grid"), width: 1, ...(chart.log && { filter: marked }) },
        font: "11px system-ui, sans-serif", gap: 6, space: 28, values: ticks(chart), size: widest, ...(chart.log && { filter: marked }) },
    ],
    // The page's own run is drawn last, on top of the others.
    series: [{}, ...chart.series.map((series) => ({
      stroke: () => colour("--run-" + series.run),
      width: (series.run === 0 ? 1.75 : 1.25) - (series.steps.length > 300 ? 0.25 : 0),
      dash: chart.sides.indexOf(series.side) > 0 ? [5, 4] : undefined,
      points: { show: series.steps.length < 25, size: 4.5, fill: () => colour("--run-" + series.run) },
    })).reverse()],
    hooks: { setCursor: [onCursor], draw: [onDraw] },
  });

  const drawChart = (figure) => {
    const chart = data.charts[+figure.dataset.chart];
    const place = figure.querySelector(".plot");
    const at = figure.querySelector(".at");
    const values = legend(figure, chart);
    const count = chart.series.length;
    const form = chart.percent ? percent : short;

    const onCursor = (plot) => {
      const pointed = plot.cursor.idx != null && plot.cursor.left >= 0;
      let step = null;
      values.forEach((node, index) => {
        const column = count - index; // series are in reverse order
        const series = chart.series[index];
        const row = pointed ? plot.cursor.idxs[column] : null;
        const value = row == null ? series.values.findLast((one) => one !== null) : plot.data[column][row];
        node.textContent = value == null ? "" : form(value);
        if (index === 0) step = row == null ? series.steps.at(-1) : plot.data[0][row];
      });
      at.textContent = "step " + step.toLocaleString("en");
    };
    const onDraw = () => {
      if (figure.dataset.drawn) return;
      figure.dataset.drawn = "true";
      root.dataset.charts = String(++drawn);
    };

    // A null is a gap in the line; a step that only another series has is not a gap. The last column has no values: it
    // makes every chart begin at 0 and end at the last step of all charts.
    const columns = [...chart.series.map((series) => [series.steps, series.values]).reverse(), [[0, lastStep], [null, null]]];
    const table = uPlot.join(columns, columns.map((column, index) => [0, index < count ? 2 : 0])).slice(0, -1);
    const plot = new uPlot(chartOptions(place, chart, onCursor, onDraw), table, place);
    onCursor(plot);
    plots.push({ plot, place });
  };

  document.querySelectorAll(".chart").forEach(drawChart);
  if (!data.charts.length) root.dataset.charts = "0";

  const resize = new ResizeObserver(() => requestAnimationFrame(() => {
    for (const { plot, place } of plots) {
      if (place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    }
  }));
  plots.forEach(({ place }) => resize.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ plot }) => plot.redraw(false, true)));

  // ---- tokens

  const readout = document.getElementById("readout");
  let current = null;

  const side = (name, entries, actual) => {
    const box = element("div");
    box.append(element("h4", "", name));
    for (const [label, p] of entries) {
      const row = element("div", label === actual ? "row actual" : "row");
      const bar = element("i");
      bar.style.width = 100 * p + "%";
      row.append(bar, element("code", "", label), element("span", "", percent(p)));
      box.append(row);
    }
    return box;
  };

  const fill = (token) => {
    const text = token.parentElement;
    const index = Array.prototype.indexOf.call(text.children, token);
    const [label, kl, teacher, student] = data.documents[+text.dataset.document][index];
    const head = element("div", "head");
    head.append(element("code", "", label), element("span", "", kl === null ? "the first token is not predicted" : "KL " + short(kl) + " nats"));
    readout.replaceChildren(head);
    if (teacher.length || student.length) {
      const sides = element("div", "sides");
      sides.append(side("teacher", teacher, label), side("student", student, label));
      readout.append(sides);
    }
  };

  const show = (token) => {
    hide();
    current = token;
    token.classList.add("on");
    token.setAttribute("aria-describedby", "readout");
    fill(token);
    readout.hidden = false;
    const box = token.getClientRects()[0] || token.getBoundingClientRect();
    const below = box.bottom + 6 + readout.offsetHeight < root.clientHeight;
    const left = Math.max(8, Math.min(box.left, root.clientWidth - readout.offsetWidth - 8));
    readout.style.left = left + scrollX + "px";
    readout.style.top = (below ? box.bottom + 6 : Math.max(4, box.top - 6 - readout.offsetHeight)) + scrollY + "px";
  };

  const hide = () => {
    if (current) {
      current.classList.remove("on");
      current.removeAttribute("aria-describedby");
    }
    current = null;
    readout.hidden = true;
  };

  // The Tab key goes from document to document; the arrow keys go from token to token.
  const walk = (event) => {
    const token = event.target;
    const next = {
      ArrowRight: token.nextElementSibling, ArrowLeft: token.previousElementSibling,
      Home: token.parentElement.firstElementChild, End: token.parentElement.lastElementChild,
    }[event.key];
    if (event.key === "Escape") hide();
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };

  for (const text of document.querySelectorAll(".text")) {
    const token = (event) => event.target.closest(".text > span");
    text.addEventListener("pointerover", (event) => (token(event) ? show(token(event)) : hide()));
    text.addEventListener("pointerleave", hide);
    text.addEventListener("focusin", (event) => token(event) && show(token(event)));
    text.addEventListener("focusout", hide);
    text.addEventListener("keydown", (event) => token(event) && walk(event));
  }
})();
