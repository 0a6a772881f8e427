"use strict";
(() => {
  const content = JSON.parse(document.getElementById("data").textContent);
  const panels = content.panels;
  const runs = [];
  const hidden = new Set();
  const byId = (id) => document.getElementById(id);
  // Pairs that colour-blind readers can tell apart; on white, and on black.
  const COLORS = {
    light: ["#0072b2", "#c94f00", "#00805d", "#a8447f", "#8a6a00", "#4b4fa8", "#5f6b7a",
      "#7a1f3d", "#14797e", "#6b3fa0"],
    dark: ["#4db2f0", "#ff8a4c", "#2fcb9c", "#f09ac9", "#e8c14b", "#a5a8ff", "#b4bfcc",
      "#ff8fa8", "#5fd6db", "#c9a4ff"],
  };
  // Ours keep theirs from page to page, and in the pictures of the bench.
  const OURS = { meka: 0, auto: 1, adameka: 2 };
  const DASHES = { solid: [], dashed: [7, 4], dotted: [2, 3], dotdash: [2, 3, 8, 3] };
  let theme = "light";
  let doc, steps, hair, extent = [0, 1], own = false, zoomed = false;

  // Numbers -------------------------------------------------------------------------

  function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  }

  function unpacked(table) {
    if (!table) return null;
    return Object.fromEntries(Object.entries(table).map(([k, v]) => [k, unpack(v)]));
  }

  function digits(value) {
    if (!Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(3)));
  }

  function nearest(x, at) {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] < at) low = middle; else high = middle;
    }
    return at - x[low] < x[high] - at ? low : high;
  }

  const color = (run) => COLORS[theme][run.color];
  const shown = () => runs.filter((run) => !hidden.has(run.index));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

  function node(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function swatch(run) {
    const made = node("span", { class: "swatch", "aria-hidden": "true" });
    made.style.background = color(run);
    return made;
  }

  // Panels of lines -------------------------------------------------------------------

  const state = Object.fromEntries(panels.map((panel) => [panel.name, {
    log: panel.log, near: false, dirty: true,
    on: Object.fromEntries(panel.lines.map((line) => [line.series, line.shown])),
  }]));

  function curves(panel) {
    const found = [];
    for (const run of shown())
      for (const line of panel.lines)
        if (state[panel.name].on[line.series] && run.series[line.series])
          found.push({ run, line, ...run.series[line.series] });
    return found;
  }

  function within(x) {
    return (k) => x[k] >= steps.start && x[k] <= steps.end;
  }

  function limits(panel, found) {
    const log = state[panel.name].log;
    let low = Infinity, high = -Infinity;
    for (const curve of found) {
      const inside = within(curve.x);
      const edges = curve.low && curve.line.band ? [curve.low, curve.y, curve.high] : [curve.y];
      for (const values of edges)
        for (let k = 0; k < values.length; k++) {
          const value = values[k];
          if (!inside(k) || !Number.isFinite(value) || (log && value <= 0)) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
    }
    if (low > high) return log ? [0.1, 10] : [0, 1];
    if (log) {
      low = Math.max(low, high * 1e-12);
      const room = Math.max(Math.log10(high / low) * 0.06, 0.04);
      return [low / 10 ** room, high * 10 ** room];
    }
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    const base = low >= 0 && low < room ? -0.03 * (high + room) : low - room;
    return [base, high + room];
  }

  function band(curve, log) {
    const xs = [], ys = [], back = [];
    for (let k = 0; k < curve.x.length; k++) {
      let low = curve.low[k], high = curve.high[k];
      if (!Number.isFinite(low) || !Number.isFinite(high) || (log && high <= 0)) continue;
      // Below zero a log scale has no place: the band then begins at its line.
      if (log && low <= 0) low = curve.y[k] > 0 ? curve.y[k] : high;
      xs.push(curve.x[k]); ys.push(low); back.push(high);
    }
    const around = xs.slice().reverse();
    return { xs: xs.concat(around), ys: ys.concat(back.reverse()) };
  }

  function drawLines(panel) {
    const plot = doc.get_model_by_name(panel.name);
    const { log } = state[panel.name];
    const found = curves(panel);
    const [low, high] = limits(panel, found);
    const bands = { xs: [], ys: [], color: [], alpha: [] };
    const lines = { xs: [], ys: [], color: [], alpha: [], dash: [], width: [] };
    const crowd = shown().length;
    for (const curve of found) {
      if (curve.low && curve.line.band) {
        const shape = band(curve, log);
        bands.xs.push(shape.xs); bands.ys.push(shape.ys);
        bands.color.push(color(curve.run)); bands.alpha.push(crowd > 4 ? 0.1 : 0.16);
      }
      lines.xs.push(curve.x);
      lines.ys.push(log ? curve.y.map((y) => (y > 0 ? y : NaN)) : curve.y);
      lines.color.push(color(curve.run)); lines.alpha.push(1);
      lines.dash.push(DASHES[curve.line.dash]); lines.width.push(curve.line.width);
    }
    plot.y_scale = plot.tags[log ? 1 : 0];
    plot.left[0].visible = !log;
    plot.left[1].visible = log;
    for (const grid of plot.center)
      if (grid.type === "Grid" && grid.dimension === 1) grid.axis = plot.left[log ? 1 : 0];
    plot.y_range.setv({ start: low, end: high });
    doc.get_model_by_name(`${panel.name}:bands`).data = bands;
    doc.get_model_by_name(`${panel.name}:lines`).data = lines;
    describe(panel, found);
  }

  function describe(panel, found) {
    const article = byId(`panel-${panel.name}`);
    const chart = byId(`chart-${panel.name}`), none = article.querySelector(".none");
    const empty = !shown().some((run) => panel.lines.some((line) => run.series[line.series]));
    chart.hidden = empty; none.hidden = !empty;
    article.querySelector("details").hidden = empty;
    article.querySelector(".legend").hidden = empty;
    if (empty) { none.textContent = "None of the runs shown records this."; return; }
    const rows = found.map((curve) => {
      const values = Array.from(curve.y).filter(Number.isFinite);
      const ends = [values[0], values[values.length - 1]];
      const low = Math.min(...(curve.low ? Array.from(curve.low).filter(Number.isFinite) : values));
      const high = Math.max(...(curve.high ? Array.from(curve.high).filter(Number.isFinite) : values));
      return [curve.run.label, curve.line.label, ...[ends[0], low, high, ends[1]].map(digits)];
    });
    const spoken = rows.map(([run, line, first, , , last]) =>
      `${run}, ${line}: from ${first} to ${last}`);
    chart.setAttribute("aria-label", `${panel.title} over steps ${digits(steps.start)} to ` +
      `${digits(steps.end)}. ${spoken.join("; ")}`);
    fill(article.querySelector("details table"),
      ["run", "curve", "first", "least", "greatest", "last"], rows);
  }

  function fill(table, head, rows) {
    const top = node("tr", {}, ...head.map((text) => node("th", { scope: "col" }, text)));
    table.replaceChildren(node("thead", {}, top),
      node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((c) => node("td", {}, c))))));
  }

  function sample(dash, width) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const drawn = { x1: 0, x2: 26, y1: 4, y2: 4, stroke: "currentColor",
      "stroke-width": width, "stroke-dasharray": DASHES[dash].join(" ") };
    for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
    made.setAttribute("aria-hidden", "true");
    made.append(line);
    return made;
  }

  function legend(panel) {
    const place = byId(`panel-${panel.name}`).querySelector(".legend");
    if (panel.kind === "profile")
      place.replaceChildren(...STOPS.map(([, label, dash, also]) =>
        node("span", {}, sample(dash, 1.8), also ? `${label}; ${also}` : label)));
    if (panel.lines.length < 2) return;
    place.replaceChildren(...panel.lines.map((line) => {
      const button = node("button", { type: "button", "aria-pressed": state[panel.name].on[line.series] },
        sample(line.dash, line.width), line.label);
      button.addEventListener("click", () => {
        const on = state[panel.name].on;
        on[line.series] = !on[line.series];
        button.setAttribute("aria-pressed", on[line.series]);
        touch(panel.name);
      });
      return button;
    }));
  }

  // Promised and delivered ------------------------------------------------------------

  function drawCalibration(panel) {
    const plot = doc.get_model_by_name("calibration");
    const dots = { x: [], y: [], color: [] };
    const lines = { xs: [], ys: [], color: [], alpha: [], dash: [], width: [] };
    const rows = [];
    let low = 0, high = 0, left = 0, right = 0;
    for (const run of shown()) {
      if (!run.calibration) continue;
      const { predicted, realised, error } = run.calibration;
      for (let k = 0; k < predicted.length; k++) {
        const ends = [realised[k] - error[k], realised[k] + error[k]];
        dots.x.push(predicted[k]); dots.y.push(realised[k]); dots.color.push(color(run));
        lines.xs.push([predicted[k], predicted[k]]); lines.ys.push(ends);
        lines.color.push(color(run)); lines.alpha.push(0.7); lines.dash.push(DASHES.solid);
        lines.width.push(1.4);
        low = Math.min(low, ends[0]); high = Math.max(high, ends[1]);
        left = Math.min(left, predicted[k]); right = Math.max(right, predicted[k]);
        rows.push([run.label, digits(predicted[k]), digits(realised[k]), digits(error[k])]);
      }
    }
    const article = byId("panel-calibration"), none = article.querySelector(".none");
    byId("chart-calibration").hidden = !rows.length; none.hidden = !!rows.length;
    article.querySelector("details").hidden = !rows.length;
    none.textContent = "None of the runs shown predicts its steps.";
    const across = (right - left) * 0.08 || 1, up = (high - low) * 0.08 || 1;
    plot.x_range.setv({ start: left - across, end: right + across });
    plot.y_range.setv({ start: low - up, end: high + up });
    doc.get_model_by_name("calibration:dots").data = dots;
    doc.get_model_by_name("calibration:lines").data = lines;
    byId("chart-calibration").setAttribute("aria-label",
      `${panel.title}: ` + rows.map((r) => `${r[0]} promised ${r[1]}, delivered ${r[2]}`).join("; "));
    fill(article.querySelector("details table"),
      ["run", "promised", "delivered", "two standard errors"], rows);
  }

  // The step in profile: the improvement model of meka/improvement.py --------------------

  const mean = (m, a) => a * (a * m.curvature / 2 - m.slope);

  function deviation(m, a) {
    return Math.sqrt(2 * m.value_variance + m.slope_variance * a ** 2 +
      m.curvature_variance * a ** 4 / 4 + m.third_order * a ** 6);
  }

  function normal(z) {  // Abramowitz and Stegun 7.1.26
    const t = 1 / (1 + 0.3275911 * Math.abs(z) / Math.SQRT2);
    const tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
      + 0.254829592) * t * Math.exp(-z * z / 2) / 2;
    return z > 0 ? 1 - tail : tail;
  }

  function probability(m, a) {
    const sd = deviation(m, a), mu = mean(m, a);
    return sd > 0 ? normal(-mu / sd) : mu < 0 ? 1 : mu > 0 ? 0 : 0.5;
  }

  function expected(m, a) {
    const sd = deviation(m, a), mu = mean(m, a);
    if (!(sd > 0)) return Math.max(-mu, 0);
    const z = -mu / sd;
    return -mu * normal(z) + sd * Math.exp(-z * z / 2) / Math.sqrt(2 * Math.PI);
  }

  const STOPS = [["step_size", "taken", "solid"], ["probability_of_improvement", "PI", "dashed", "chance of improvement"],
    ["quadratic", "quadratic", "dotted"], ["expected_improvement", "EI", "dotdash", "expected improvement"]];

  function profiled() {
    const able = runs.filter((run) => run.profile);
    const wanted = Number(byId("profile-run").value);
    return able.find((run) => run.index === wanted) || able[0];
  }

  function drawProfile(panel) {
    const article = byId("panel-profile"), none = article.querySelector(".none");
    const run = profiled();
    for (const part of article.querySelectorAll(".legend, .controls, .readout, .chart, details"))
      part.hidden = !run;
    none.hidden = !!run;
    if (!run) { none.textContent = "None of the runs records what a step was decided from."; return; }
    const slider = byId("profile-slider"), count = run.profile.step.length;
    slider.max = count - 1;
    if (byId("profile-follow").checked) slider.value = count - 1;
    const k = Number(slider.value);
    const m = Object.fromEntries(Object.entries(run.profile).map(([name, values]) => [name, values[k]]));
    byId("profile-step").textContent = digits(m.step);
    slider.setAttribute("aria-valuetext", `step ${m.step}`);
    const stops = STOPS.map(([name, label, dash]) => ({ label, dash, at: m[name] }));
    const far = Math.max(...stops.map((s) => s.at).filter((a) => Number.isFinite(a) && a < 1e30));
    const end = far > 0 ? Math.min(2.2 * far, 3 * (m.step_size || far)) : 1;
    const a = Array.from({ length: 121 }, (_, j) => end * j / 120);
    const mu = a.map((x) => mean(m, x)), sd = a.map((x) => deviation(m, x));
    const lowest = Math.min(...mu.map((v, j) => v - 2 * sd[j]), 0);
    const highest = Math.max(...mu.map((v, j) => v + 2 * sd[j]), 0);
    const room = (highest - lowest) * 0.06 || 1;
    doc.get_model_by_name("along").setv({ start: 0, end });
    const ink = css("--ink").trim(), soft = css("--soft").trim(), main = color(run);
    const walls = (low, high) => {
      const able = stops.filter((s) => s.at <= end);
      return { xs: able.map((s) => [s.at, s.at]), ys: able.map(() => [low, high]),
        color: able.map((s) => (s.label === "taken" ? ink : soft)), alpha: able.map(() => 1),
        dash: able.map((s) => DASHES[s.dash]), width: able.map((s) => (s.label === "taken" ? 2 : 1.3)) };
    };
    const draw = (name, low, high, rows, bands) => {
      const lines = walls(low, high);
      for (const row of rows) {
        lines.xs.push(a); lines.ys.push(row.y); lines.color.push(row.color); lines.alpha.push(1);
        lines.dash.push(DASHES[row.dash ?? "solid"]); lines.width.push(2);
      }
      doc.get_model_by_name(name).y_range.setv({ start: low, end: high });
      doc.get_model_by_name(`${name}:lines`).data = lines;
      doc.get_model_by_name(`${name}:bands`).data = bands;
    };
    draw("profile", lowest - room, highest + room,
      [{ y: mu, color: main }, { y: a.map(() => 0), color: soft, dash: "dotted" }], {
        xs: [a.concat(a.slice().reverse())],
        ys: [mu.map((v, j) => v - 2 * sd[j]).concat(mu.map((v, j) => v + 2 * sd[j]).reverse())],
        color: [main], alpha: [0.16] });
    const gains = a.map((x) => expected(m, x)), most = Math.max(...gains) || 1;
    draw("chance", -0.04, 1.06, [{ y: a.map((x) => probability(m, x)), color: main, dash: "dashed" },
      { y: gains.map((v) => v / most), color: main, dash: "dotdash" }],
      { xs: [], ys: [], color: [], alpha: [] });
    const seed = run.seeds > 1 ? ", first seed" : "";
    const where = stops.map((s) => `${s.label} ${digits(s.at)}`).join(", ");
    const told = `Step ${digits(m.step)}${seed}: ${where}. Predicted change ` +
      `${digits(mean(m, m.step_size))} ± ${digits(2 * deviation(m, m.step_size))}, improving with ` +
      `probability ${digits(probability(m, m.step_size))}.`;
    byId("profile-text").textContent = told;
    byId("chart-profile").setAttribute("aria-label",
      `${panel.title}. Above: predicted change of the loss with its band. Below: chance of ` +
      `improvement, dashed, and expected improvement as a share of its most. ${told}`);
    fill(article.querySelector("details table"), ["quantity", "value"],
      Object.entries(m).map(([name, value]) => [name.replaceAll("_", " "), digits(value)]));
  }

  function chooseProfile() {
    const select = byId("profile-run"), before = select.value;
    const able = runs.filter((run) => run.profile);
    select.replaceChildren(...able.map((run) => {
      const option = node("option", { value: run.index }, run.label);
      option.selected = String(run.index) === before;
      return option;
    }));
  }

  // Drawing what can be seen ------------------------------------------------------------

  const DRAW = { lines: drawLines, calibration: drawCalibration, profile: drawProfile };
  let planned = false;

  function touch(...names) {
    for (const name of names.length ? names : panels.map((p) => p.name)) state[name].dirty = true;
    if (planned) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      for (const panel of panels) {
        const mine = state[panel.name];
        if (!mine.dirty || !mine.near) continue;
        mine.dirty = false;
        DRAW[panel.kind](panel);
      }
    });
  }

  const lookout = new IntersectionObserver((entries) => {
    for (const entry of entries) state[entry.target.id.slice(6)].near = entry.isIntersecting;
    touch(...panels.filter((p) => state[p.name].dirty).map((p) => p.name));
  }, { rootMargin: "400px" });

  // Time ----------------------------------------------------------------------------------

  function look(start, end) {
    own = true;
    steps.setv({ start, end });
    own = false;
    touch(...panels.filter((p) => p.kind === "lines").map((p) => p.name));
  }

  function whole() { zoomed = false; look(...extent); }

  function move(how) {
    if (how === "all") { whole(); return; }
    const { start, end } = steps, width = end - start, middle = (start + end) / 2;
    const half = { in: width / 4, out: width }[how] ?? width / 2;
    let centre = middle + ({ left: -width / 3, right: width / 3 }[how] ?? 0);
    const [first, last] = extent;
    if (2 * half >= last - first) { whole(); return; }
    centre = Math.min(Math.max(centre, first + half), last - half);
    zoomed = true;
    look(centre - half, centre + half);
  }

  // Words ---------------------------------------------------------------------------------

  const WORDS = { good: "good", note: "note", warn: "look" };

  function tellRuns() {
    const place = document.querySelector("fieldset.runs");
    const kept = place.querySelector("legend");
    place.replaceChildren(kept, ...runs.map((run) => {
      const box = node("input", { type: "checkbox" });
      box.checked = !hidden.has(run.index);
      box.addEventListener("change", () => {
        if (box.checked) hidden.delete(run.index); else hidden.add(run.index);
        touch();
      });
      const words = content.live ? `${run.state}${run.step ? `, step ${digits(run.step)}` : ""}` : "";
      return node("label", { class: "run", title: run.name }, box, swatch(run), run.label,
        node("small", {}, words));
    }));
  }

  function tellSummary() {
    const names = Object.keys(runs[0]?.summary ?? {});
    const head = ["run", ...names].map((text) => node("th", { scope: "col" }, text));
    const body = runs.map((run) => {
      const title = node("span", { class: "name" }, swatch(run), run.label);
      const cells = names.map((name) => {
        const [main, rest] = run.summary[name].split(/ (?=\()/);
        const cell = node("td", { "data-label": name }, node("span", {}, main,
          ...(rest ? [node("small", {}, rest.slice(1, -1))] : [])));
        return cell;
      });
      return node("tr", {}, node("th", { scope: "row" }, title), ...cells);
    });
    byId("summary-table").replaceChildren(node("thead", {}, node("tr", {}, ...head)),
      node("tbody", {}, ...body));
  }

  function tellStories() {
    byId("stories").replaceChildren(...runs.map((run) => {
      const facts = Object.entries(run.about).map(([name, value]) => `${name} ${value}`).join(" · ");
      const items = run.story.map((found) => {
        const text = node("span", {}, node("b", {}, `${found.title}. `), found.text);
        if (found.advice) text.append(node("span", { class: "advice" }, found.advice));
        return node("li", {}, node("span", { class: `badge ${found.level}` }, WORDS[found.level]), text);
      });
      const title = node("h3", {}, node("span", { class: "name" }, swatch(run), run.label));
      return node("article", { class: "story" }, node("header", {}, title),
        node("p", { class: "facts" }, facts), node("ul", {}, ...items));
    }));
  }

  // Runs ------------------------------------------------------------------------------------

  function take(index, view) {
    const series = Object.fromEntries(Object.entries(view.series).map(([k, v]) => [k, unpacked(v)]));
    runs[index] = { ...view, index, series, calibration: unpacked(view.calibration),
      profile: unpacked(view.profile) };
  }

  function dealColors() {
    const count = COLORS.light.length, kept = Object.keys(OURS).length;
    // Others have those of ours last.
    const free = new Set(Array.from({ length: count }, (_, k) => (k + kept) % count));
    const claim = (run, wanted) => { run.color = wanted; free.delete(wanted); };
    const others = runs.filter((run) => {
      const wanted = OURS[run.about.optimizer];
      if (!free.has(wanted)) return true;
      claim(run, wanted);
      return false;
    });
    for (const run of others) {
      const [first = run.index % count] = free;
      claim(run, first);
    }
  }

  function apply() {
    dealColors();
    const seen = new Map();
    for (const run of runs) seen.set(run.label, (seen.get(run.label) ?? 0) + 1);
    for (const run of runs)
      if (seen.get(run.label) > 1) run.label = `${run.label} (${run.name})`;
    let first = Infinity, last = -Infinity;
    for (const run of runs)
      for (const { x } of Object.values(run.series))
        if (x.length) { first = Math.min(first, x[0]); last = Math.max(last, x[x.length - 1]); }
    if (first < last) extent = [first, last];
    if (!zoomed) look(...extent);
    tellRuns(); tellSummary(); tellStories(); chooseProfile();
    touch();
  }

  // Light and dark -----------------------------------------------------------------------------

  function paint(name) {
    theme = name;
    document.documentElement.dataset.theme = name;
    byId("theme").setAttribute("aria-pressed", name === "dark");
    const ink = css("--ink").trim(), soft = css("--soft").trim();
    const rule = css("--rule").trim(), grid = css("--grid").trim();
    for (const root of doc.roots()) {
      for (const axis of [...root.left, ...root.below])
        axis.setv({ axis_line_color: rule, major_tick_line_color: rule,
          major_label_text_color: soft, axis_label_text_color: soft,
          major_label_text_font_size: "11px", axis_label_text_font_size: "11px",
          axis_label_text_font_style: "normal" });
      for (const part of root.center) {
        if (part.type === "Grid") part.grid_line_color = grid;
        else if (part.name?.endsWith(":mark")) part.line_color = soft;
      }
    }
    hair.line_color = ink;
    apply();
  }

  // Hovering ---------------------------------------------------------------------------------------

  function hover(panel, event) {
    const tip = byId("tip");
    const found = curves(panel).filter((curve) => curve.x.length);
    if (!found.length) { tip.hidden = true; return; }
    const rows = found.slice(0, 14).map((curve) => {
      const k = nearest(curve.x, event.x);
      const range = curve.low && curve.line.band && curve.high[k] > curve.low[k]
        ? ` (${digits(curve.low[k])} to ${digits(curve.high[k])})` : "";
      const what = panel.lines.length > 1 ? `${curve.run.label}, ${curve.line.label}` : curve.run.label;
      return node("div", {}, swatch(curve.run), node("span", {}, what),
        node("span", {}, digits(curve.y[k]) + range));
    });
    tip.replaceChildren(node("b", {}, `step ${digits(Math.round(event.x))}`), ...rows);
    tip.hidden = false;
    const box = byId(`chart-${panel.name}`).getBoundingClientRect();
    const left = box.left + event.sx, top = box.top + event.sy;
    const across = left + 16 + tip.offsetWidth > innerWidth ? left - 16 - tip.offsetWidth : left + 16;
    tip.style.left = `${Math.max(4, across)}px`;
    tip.style.top = `${Math.min(Math.max(4, top + 12), innerHeight - tip.offsetHeight - 4)}px`;
  }

  // Live ---------------------------------------------------------------------------------------------

  let versions = [], failures = 0;

  async function ask() {
    if (!document.hidden) {
      try {
        const answer = await fetch(`data?known=${versions.join(",")}`, {
          cache: "no-store", signal: AbortSignal.timeout(20000) });
        if (!answer.ok) throw new Error(answer.status);
        const news = await answer.json();
        versions = news.versions;
        for (const [index, view] of Object.entries(news.runs)) take(Number(index), view);
        if (Object.keys(news.runs).length) apply();
        failures = 0;
        tell("on", runs.every((run) => run.state === "done") ? "all done" : "live");
      } catch {
        failures += 1;
        tell("off", "connection lost, trying again");
      }
    }
    setTimeout(ask, Math.min(1500 * 2 ** failures, 15000));
  }

  function tell(live, text) {
    const place = byId("status");
    place.dataset.live = live;
    if (place.textContent !== text) place.textContent = text;
  }

  // Beginning ---------------------------------------------------------------------------------------

  function keys(event) {
    const how = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
    if (!how || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(how);
  }

  function begin() {
    doc = Bokeh.documents[0];
    if (!doc?.get_model_by_name("chance")) { setTimeout(begin, 20); return; }
    steps = doc.get_model_by_name("steps");
    hair = doc.get_model_by_name("hair");
    steps.change.connect(() => {
      if (own) return;
      zoomed = true;
      touch(...panels.filter((p) => p.kind === "lines").map((p) => p.name));
    });
    const coarse = matchMedia("(pointer: coarse)").matches;
    const small = matchMedia("(max-width: 760px)").matches;
    for (const panel of panels) {
      const plot = doc.get_model_by_name(panel.name), chart = byId(`chart-${panel.name}`);
      lookout.observe(byId(`panel-${panel.name}`));
      legend(panel);
      if (panel.kind !== "lines") continue;
      if (small) plot.height = Math.min(plot.height, 280);
      if (coarse) plot.toolbar.gestures.pan.active = null;  // a finger scrolls the page
      plot.on_event("mousemove", (event) => hover(panel, event));
      plot.on_event("tap", (event) => hover(panel, event));
      plot.on_event("doubletap", whole);
      plot.on_event("mouseleave", () => { byId("tip").hidden = true; });
      chart.addEventListener("keydown", keys);
    }
    for (const button of document.querySelectorAll("[data-zoom]"))
      button.addEventListener("click", () => move(button.dataset.zoom));
    for (const button of document.querySelectorAll("[data-scale]"))
      button.addEventListener("click", () => {
        const mine = state[button.dataset.scale];
        mine.log = !mine.log;
        button.setAttribute("aria-pressed", mine.log);
        touch(button.dataset.scale);
      });
    byId("theme").addEventListener("click", () => {
      const next = theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("meka-theme", next); } catch { /* a file may not */ }
      paint(next);
    });
    const redraw = () => touch("profile");
    byId("profile-slider").addEventListener("input", () => {
      byId("profile-follow").checked = false;
      redraw();
    });
    byId("profile-run").addEventListener("change", redraw);
    byId("profile-follow").addEventListener("change", redraw);
    content.runs.forEach((view, index) => take(index, view));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let kept = null;
    try { kept = localStorage.getItem("meka-theme"); } catch { /* a file may not */ }
    paint(kept ?? (dark.matches ? "dark" : "light"));
    dark.addEventListener("change", () => paint(dark.matches ? "dark" : "light"));
    if (content.live) { tell("on", "live"); ask(); }
    window.meka = { runs, steps, state, probability, expected, doc };
    document.documentElement.dataset.ready = "yes";
  }

  if (document.readyState === "complete") begin();
  else window.addEventListener("load", begin);
})();
