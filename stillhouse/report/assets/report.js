// The interactive parts of the page: charts that share one cursor, their settings, and the values of a held-out token.
"use strict";
(() => {
  let data;
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

  // ---- settings: they are stored in the address after #, so that a copied address or a reload shows the same view

  const MANY = 25; // a series with fewer points is drawn with its points, and is not smoothed
  const view = { smooth: 0, log: new Map(), zoom: null, shaded: "" }; // log: the reader's choice of the axis, by the chart's title

  const readView = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const smooth = Number(given.get("smooth"));
    view.smooth = smooth > 0 && smooth < 1 ? smooth : 0;
    view.log = new Map([...given.getAll("log").map((title) => [title, true]), ...given.getAll("linear").map((title) => [title, false])]);
    const zoom = (given.get("steps") || "").split("..").map(Number);
    view.zoom = zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null;
    view.shaded = given.get("shaded") || "";
  };
  const keepView = () => {
    const kept = new URLSearchParams();
    if (view.smooth) kept.set("smooth", view.smooth);
    for (const [title, log] of view.log) kept.append(log ? "log" : "linear", title);
    if (view.zoom) kept.set("steps", view.zoom.map((step) => +step.toPrecision(8)).join(".."));
    if (view.shaded) kept.set("shaded", view.shaded);
    const hash = kept.toString();
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", location.pathname + location.search + (hash && "#" + hash));
  };

  // ---- charts

  let plots = [];
  let drawn = 0;
  let restoring = false;

  const isLog = (chart) => chart.positive && (view.log.get(chart.title) ?? chart.log);

  // The moving average with exponential weights, started without a bias towards 0. A gap stays a gap.
  const smoothed = (series) => {
    if (!view.smooth || series.steps.length < MANY) return series.values;
    let [sum, weight] = [0, 0];
    return (series.means || series.values).map((value) => {
      if (value === null) return null;
      sum = view.smooth * sum + (1 - view.smooth) * value;
      weight = view.smooth * weight + (1 - view.smooth);
      return sum / weight;
    });
  };

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
        if (data.runs.length > 1) {
          const name = element("span", "run-name", data.runs[series.run]);
          name.title = data.runs[series.run];
          item.append(name);
        }
        if (series.side) item.append(element("span", "side", series.side));
      }
      const value = element("b");
      item.append(value);
      figure.querySelector(".legend").append(item);
      return value;
    });
  };

  // The x axis has whole steps, the same in every chart. The y axis is as wide as its labels. A logarithmic axis has
  // marks at powers of ten; if it spans less than two powers, also at 2 and 5 times these powers.
  let lastStep = 1;
  const steps = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((power) => [power, 2 * power, 5 * power]);
  const widest = (plot, labels) => 12 + Math.max(3, ...(labels || []).map((label) => label.length)) * 6.3;
  const marked = (plot, splits) => {
    const digits = plot.scales.y.max / plot.scales.y.min < 100 ? [1, 2, 5] : [1];
    return splits.map((value) => (digits.includes(Math.round(value / 10 ** Math.floor(Math.log10(value) + 1e-9))) ? value : null));
  };

  // A share that never changes has no range of its own: the axis is then from 0 to 100 %.
  const shares = (plot, low, high) => (low === high ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));

  const chartOptions = (plot, chart, curves, onCursor, onDraw) => ({
    width: plot.clientWidth,
    height: plot.clientHeight,
    legend: { show: false },
    padding: [8, 12, 0, 0],
    cursor: { sync: { key: "steps", scales: ["x", null] }, y: false, points: { size: 6 }, dataIdx: nearest },
    scales: { x: { time: false }, y: { distr: isLog(chart) ? 3 : 1, ...(chart.percent && { range: shares }) } },
    axes: [
      { stroke: () => colour("--muted"), grid: { show: false }, ticks: { stroke: () => colour("--rule"), size: 4, width: 1 },
        font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", label: "step", labelSize: 14, labelGap: -2,
        size: 22, gap: 2, space: 55, values: ticks({}), incrs: steps },
      { stroke: () => colour("--muted"), ticks: { show: false },
        grid: { stroke: () => colour("--grid"), width: 1, ...(isLog(chart) && { filter: marked }) },
        font: "11px system-ui, sans-serif", gap: 6, space: 28, values: ticks(chart), size: widest, ...(isLog(chart) && { filter: marked }) },
    ],
    // The page's own run is drawn last, on top of the others. A smoothed curve has a faint curve of the values behind it.
    series: [{}, ...curves.map(({ series, faint }) => ({
      stroke: () => colour("--run-" + series.run) + (faint ? "40" : ""),
      width: (series.run === 0 ? 1.75 : 1.25) - (series.steps.length > 300 ? 0.25 : 0) - (faint ? 0.5 : 0),
      dash: chart.sides.indexOf(series.side) > 0 ? [5, 4] : undefined,
      points: { show: series.steps.length < MANY, size: 4.5, fill: () => colour("--run-" + series.run) },
    }))],
    hooks: { setCursor: [onCursor], draw: [onDraw], setScale: [onScale] },
  });

  // Zooming one chart zooms all of them, because they share a cursor; the address keeps the steps that are shown.
  const onScale = (plot, axis) => {
    if (axis !== "x" || restoring) return;
    const { min, max } = plot.scales.x;
    view.zoom = min <= 0 && max >= lastStep ? null : [min, max];
    keepView();
  };

  const drawChart = (figure) => {
    const chart = data.charts[+figure.dataset.chart];
    const place = figure.querySelector(".plot");
    const at = figure.querySelector(".at");
    figure.querySelector(".legend").replaceChildren();
    place.querySelector(".uplot")?.remove();
    const values = legend(figure, chart);
    const form = chart.percent ? percent : short;
    const button = figure.querySelector(".log");
    button.hidden = !chart.positive;
    button.setAttribute("aria-pressed", String(isLog(chart)));

    // In the order of drawing: faint curves, then the runs in reverse order.
    const main = chart.series.map((series) => ({ series, values: smoothed(series) })).reverse();
    const behind = main.filter(({ series, values }) => values !== series.values);
    const curves = [...behind.map(({ series }) => ({ series, values: series.values, faint: true })), ...main];
    const column = (index) => curves.length - index;

    const onCursor = (plot) => {
      const pointed = plot.cursor.idx != null && plot.cursor.left >= 0;
      let step = null;
      values.forEach((node, index) => {
        const curve = curves[column(index) - 1];
        const row = pointed ? plot.cursor.idxs[column(index)] : null;
        const value = row == null ? curve.values.findLast((one) => one !== null) : plot.data[column(index)][row];
        node.textContent = value == null ? "" : form(value);
        if (index === 0) step = row == null ? curve.series.steps.at(-1) : plot.data[0][row];
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
    const columns = [...curves.map((curve) => [curve.series.steps, curve.values]), [[0, lastStep], [null, null]]];
    const table = uPlot.join(columns, columns.map((_, index) => [0, index < curves.length ? 2 : 0])).slice(0, -1);
    const plot = new uPlot(chartOptions(place, chart, curves, onCursor, onDraw), table, place);
    if (view.zoom) plot.setScale("x", { min: view.zoom[0], max: view.zoom[1] });
    onCursor(plot);
    plots.push({ plot, place, figure });
  };

  const drawCharts = (figures) => {
    restoring = true;
    const again = new Set(figures);
    plots.filter(({ figure }) => again.has(figure)).forEach(({ plot }) => plot.destroy());
    plots = plots.filter(({ figure }) => !again.has(figure));
    figures.forEach(drawChart);
    // uPlot sets its scales in a microtask, which comes before this one
    queueMicrotask(() => queueMicrotask(() => { restoring = false; }));
  };

  const resize = new ResizeObserver(() => requestAnimationFrame(() => {
    document.querySelectorAll(".charts, .figures, .tables").forEach(arrange);
    for (const { plot, place } of plots) {
      if (place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    }
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({ plot }) => plot.redraw(false, true)));

  // Distribute the tiles evenly over as many rows as the width needs, so that the last row is not nearly empty.
  const arrange = (grid) => {
    const style = getComputedStyle(grid);
    const [gap, least] = [parseFloat(style.columnGap), parseFloat(style.getPropertyValue("--least"))];
    const count = grid.children.length;
    const fitting = Math.max(1, Math.floor((grid.clientWidth + gap) / (least + gap)));
    const rows = Math.ceil(count / fitting);
    grid.dataset.arranged = "true";
    Array.prototype.forEach.call(grid.children, (tile, index) => {
      // if the tiles do not divide evenly, the first rows get one more tile
      const more = count % rows, few = Math.floor(count / rows);
      const inRow = index < more * (few + 1) ? few + 1 : few;
      tile.style.flexBasis = `calc((100% - ${(inRow - 1) * gap}px) / ${inRow} - 0.1px)`;
    });
  };

  const startCharts = () => {
    data = JSON.parse(document.getElementById("data").textContent);
    lastStep = Math.max(1, ...data.charts.flatMap((chart) => chart.series.map((series) => series.steps.at(-1))));
    plots.forEach(({ plot }) => plot.destroy());
    [plots, drawn] = [[], 0];
    readView();
    root.dataset.charts = "0"; // this comes first, because it shows the parts that need scripts
    document.querySelectorAll(".charts, .figures, .tables").forEach(arrange);
    const figures = [...document.querySelectorAll(".chart")];
    drawCharts(figures);
    resize.disconnect();
    resize.observe(document.querySelector("main"));
    const slider = document.getElementById("smooth");
    if (!slider) return;
    const said = document.getElementById("smooth-value");
    const say = () => { said.textContent = view.smooth ? view.smooth.toFixed(2) : "off"; };
    slider.value = view.smooth;
    say();
    slider.addEventListener("input", () => {
      view.smooth = +slider.value;
      say();
      drawCharts(figures);
      keepView();
    });
    for (const figure of figures) {
      figure.querySelector(".log").addEventListener("click", () => {
        const chart = data.charts[+figure.dataset.chart];
        const log = !isLog(chart);
        if (log === chart.log) view.log.delete(chart.title);
        else view.log.set(chart.title, log);
        drawCharts([figure]);
        keepView();
      });
    }
  };

  // ---- tokens

  const readout = document.getElementById("readout");
  let current = null;

  const side = (name, entries, actual, form = percent) => {
    const box = element("div");
    box.append(element("h4", "", name));
    for (const [label, p] of entries) {
      const row = element("div", label === actual ? "row actual" : "row");
      const bar = element("i");
      bar.style.width = Math.min(100, 100 * p) + "%";
      row.append(bar, element("code", "", label), element("span", "", form(p)));
      box.append(row);
    }
    return box;
  };

  // The effect of one term of the objective at a token: its value, its gradient, and the logits that it moves most.
  const effect = (name, [value, gradient, raises, lowers], actual) => {
    const box = element("div", "effect");
    const sides = element("div", "sides");
    sides.append(side("raises", raises, actual, short), side("lowers", lowers, actual, short));
    box.append(element("h4", "", `${name} ${short(value)}, gradient ${short(gradient)}`), sides);
    return box;
  };

  const fill = (token) => {
    const text = token.parentElement;
    const index = Array.prototype.indexOf.call(text.children, token);
    const [label, kl, teacher, student, terms] = data.documents[+text.dataset.document][index];
    const head = element("div", "head");
    head.append(element("code", "", label), element("span", "", kl === null ? "the first token is not predicted" : "KL " + short(kl) + " nats"));
    readout.replaceChildren(head);
    if (teacher.length || student.length) {
      const sides = element("div", "sides");
      sides.append(side("teacher", teacher, label), side("student", student, label));
      readout.append(sides);
    }
    terms.forEach((term, at) => term && readout.append(effect(data.terms[at], term, label)));
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

  // Shades the held-out text by the KL (the default) or by the gradient of a term.
  const shadeTokens = () => {
    const select = document.getElementById("shaded");
    if (!select) return;
    const term = data.terms.indexOf(view.shaded);
    select.value = term < 0 ? "" : view.shaded;
    select.closest("section").querySelector(".scale span").textContent = term < 0 ? "nats" : "gradient";
    for (const text of document.querySelectorAll(".text[data-document]")) {
      data.documents[+text.dataset.document].forEach((entry, index) => {
        const token = text.children[index];
        if (token.classList.contains("prompt")) return;
        const value = term < 0 ? entry[1] : entry[4][term] && entry[4][term][1];
        token.className = value === null ? "" : "k" + data.shades.filter((least) => least <= value).length;
      });
    }
  };

  const startTokens = () => {
    hide();
    shadeTokens();
    document.getElementById("shaded")?.addEventListener("change", (event) => {
      view.shaded = event.target.value;
      shadeTokens();
      keepView();
    });
    for (const text of document.querySelectorAll(".text")) {
      const token = (event) => event.target.closest(".text > span");
      text.addEventListener("pointerover", (event) => (token(event) ? show(token(event)) : hide()));
      text.addEventListener("pointerleave", hide);
      text.addEventListener("focusin", (event) => token(event) && show(token(event)));
      text.addEventListener("focusout", hide);
      text.addEventListener("keydown", (event) => token(event) && walk(event));
    }
  };

  startCharts();
  startTokens();
  addEventListener("hashchange", () => {
    readView();
    startCharts();
    shadeTokens();
  });
  // `stillhouse report --watch` has replaced the page's content with the content of a later step.
  document.addEventListener("stillhouse-renewed", () => {
    startCharts();
    startTokens();
  });
})();
