"use strict";
(() => {
  const AXES = { step: "Steps", bytes: "Bytes", time: "Time", flops: "FLOPs", energy: "Energy" };
  const AXIS_TITLES = { step: "server steps", bytes: "bytes up and down", time: "simulated time", flops: "FLOPs on clients", energy: "energy of clients, joules" };
  const METRICS = { accuracy: "Test accuracy", loss: "Test loss", train_loss: "Training loss", update_norm: "Norm of updates", staleness: "Staleness", epsilon: "Privacy spent, ε", accuracy_personal: "Accuracy, personalized", loss_personal: "Loss, personalized", accuracy_clients: "Accuracy, mean client", accuracy_worst_tenth: "Accuracy, worst tenth", loss_clients: "Loss, mean client", loss_worst_tenth: "Loss, worst tenth" };
  const LAST = { contraction: "Contraction: the error that a lossy broadcast leaves, as a fraction of what it sent; below 1 it shrinks" };
  const inPercent = (metric) => metric.startsWith("accuracy");
  const BANDS = { interval: "95 % interval", range: "Min to max", none: "No bands" };
  const $ = (id) => document.getElementById(id);
  let data = JSON.parse($("data").textContent);
  const view = { axis: "step", metric: data.metric, scale: "linear", band: null, line: 0, hidden: new Set() };

  // Elements -----------------------------------------------------------------------------------------

  function make(space, tag, attributes, ...children) {
    const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key === "style") element.style.cssText = value;
      else element.setAttribute(key, value);
    }
    element.append(...children.filter((c) => c !== null && c !== undefined));
    return element;
  }
  const html = (tag, attributes, ...children) => make(null, tag, attributes, ...children);
  const svg = (tag, attributes, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, ...children);

  function choose(id, choices, chosen, pick) {
    const place = $(id);
    place.replaceChildren(
      ...(choices.length < 2 ? [] : choices.map(([value, text]) =>
        html("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text))),
    );
  }

  // A name may break after what opens, parts or assigns; a command between its words.
  const named = (text) => text.split(/(?<=[(,=])/).flatMap((piece) => [piece, html("wbr")]);
  const typed = (command) => (command.match(/(?:[^\s'"]|'[^']*'|"[^"]*")+/g) || []).flatMap((word, i) => [i ? " " : "", html("span", { class: "word" }, word)]);

  // Numbers ------------------------------------------------------------------------------------------

  function scaled(value, units) {
    let i = 0;
    while (Math.abs(value) >= 999.5 && i < units.length - 1) { value /= 1000; i += 1; }
    const digits = i === 0 && Number.isInteger(value) ? 0 : Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
    return `${value.toFixed(digits)} ${units[i]}`.trim();
  }
  const bytes = (v) => scaled(v, ["B", "kB", "MB", "GB", "TB", "PB"]);
  const count = (v) => scaled(v, ["", "k", "M", "G", "T", "P"]);
  const plain = (v) => (v === 0 ? "0" : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(1) : String(+v.toPrecision(4)));
  const along = (axis, v) => (axis === "bytes" ? bytes(v) : axis === "flops" ? count(v) : plain(v));
  const upward = (metric, v) => (inPercent(metric) ? `${(100 * v).toFixed(2)} %` : plain(v));
  const lasting = (s) => (s < 120 ? `${Math.floor(s)} s` : s < 7200 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`);
  const dash = "–";
  const maybe = (v, format) => (v === null || v === undefined ? dash : format(v));

  function within(interval, metric) {
    if (!interval) return dash;
    const percent = inPercent(metric);
    const one = (v) => (percent ? (100 * v).toFixed(2) : v.toFixed(4));
    return one(interval.mean) + (interval.half === null ? "" : ` ± ${one(interval.half)}`) + (percent ? " %" : "");
  }

  // Charts -------------------------------------------------------------------------------------------

  const colour = (i) => `var(--${charts.colour(i)})`;
  const shade = (i) => `color-mix(in srgb, var(--ink) ${[78, 48, 28, 62, 14, 38][i % 6]}%, var(--card))`;

  function series(metric, axis) {
    return data.groups
      .map((group, i) => ({ i, name: group.name, curve: group.curves[metric] }))
      .filter((s) => s.curve && s.curve.x[axis] && !view.hidden.has(s.name));
  }

  function plot(place, metric, axis, options) {
    const shown = series(metric, axis);
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", `${METRICS[metric] || metric} over ${AXIS_TITLES[axis]}`);
    if (!shown.length) {
      if (place.chart) { place.chart.destroy(); place.chart = null; }
      return place.replaceChildren(html("p", { class: "empty" }, options.empty || "Nothing to draw: every curve is hidden."));
    }
    const what = `${metric} ${axis}`;
    if (place.dataset.what !== what) { place.dataset.what = what; place.zoom = null; }
    charts.curves(place, {
      shown, axis, metric, height: options.height, band: view.band,
      log: Boolean(options.log) && shown.every((s) => s.curve.mean.every((v) => v > 0)),
      target: metric === "accuracy" ? data.target : null,
      formats: { along: (v) => along(axis, v), up: (v) => (inPercent(metric) ? `${+(100 * v).toPrecision(4)} %` : plain(v)) },
      label: { along: AXIS_TITLES[axis] },
      tell: (value, u) => (value === null ? hush() : tell(u, metric, axis, shown, value)),
    });
  }

  function tell(u, metric, axis, shown, value) {
    const lines = [];
    for (const s of shown) {
      const xs = s.curve.x[axis];
      if (value > xs[xs.length - 1] * 1.02) continue;
      let j = 0;
      while (j < xs.length - 1 && Math.abs(xs[j + 1] - value) <= Math.abs(xs[j] - value)) j += 1;
      lines.push([s, s.curve.mean[j], around(s.curve, j, metric)]);
    }
    lines.sort((a, b) => (inPercent(metric) ? b[1] - a[1] : a[1] - b[1]));
    tip(u,
      html("div", { class: "soft" }, `${along(axis, axis === "step" ? Math.round(value) : value)} ${axis === "bytes" ? "" : AXIS_TITLES[axis]}`.trim()),
      ...lines.map(([s, v, band]) => html("div", null,
        html("span", { class: "who" }, html("span", { class: "swatch", style: `background:${colour(s.i)}` }), ...named(s.name)),
        html("span", { class: "num" }, upward(metric, v) + band))));
  }

  function around(curve, j, metric) {
    const one = (v) => (inPercent(metric) ? (100 * v).toFixed(2) : plain(v));
    if (!curve.half || view.band === "none") return "";
    return view.band === "range" ? ` (${one(curve.low[j])} to ${one(curve.high[j])})` : ` ± ${one(curve.half[j])}`;
  }

  function hush() { $("tip").hidden = true; }

  function tip(u, ...lines) {
    const sign = $("tip"), over = u.over.getBoundingClientRect();
    sign.replaceChildren(...lines);
    sign.hidden = false;
    const box = sign.getBoundingClientRect(), x = over.left + u.cursor.left, y = over.top + u.cursor.top;
    sign.style.left = `${Math.max(4, x + 16 + box.width > window.innerWidth ? x - box.width - 16 : x + 16)}px`;
    sign.style.top = `${Math.max(4, Math.min(window.innerHeight - box.height - 4, y + 12))}px`;
  }

  // Parts of the page --------------------------------------------------------------------------------

  function controls() {
    const custom = new Set(data.groups.flatMap((g) => Object.keys(g.curves)).filter((m) => !EXTRAS[m] && !["accuracy", "loss", "train_loss"].includes(m)));
    const metrics = ["accuracy", ...custom, "loss", "train_loss"].filter((m) => data.groups.some((g) => g.curves[m]));
    if (!metrics.includes(view.metric) && metrics.length) view.metric = metrics[0];
    const axes = Object.keys(AXES).filter((a) => data.groups.some((g) => Object.values(g.curves).some((c) => c && c.x[a])));
    if (!axes.includes(view.axis) && axes.length) view.axis = axes[0];
    choose("metric", metrics.map((m) => [m, METRICS[m] || m]), view.metric, (m) => { view.metric = m; render(); });
    choose("axis", axes.map((a) => [a, AXES[a]]), view.axis, (a) => { view.axis = a; render(); });
    choose("scale", inPercent(view.metric) ? [] : [["linear", "Linear"], ["log", "Log"]], view.scale, (s) => { view.scale = s; render(); });
    const seeds = Math.max(...data.groups.map((g) => g.seeds.length));
    if (view.band === null) view.band = seeds < 2 ? "none" : seeds < 5 ? "range" : "interval"; // few seeds make wide intervals
    choose("band", seeds < 2 ? [] : Object.entries(BANDS), view.band, (b) => { view.band = b; render(); });
    const theme = document.documentElement.dataset.theme;
    choose("theme", [["light", "Light"], ["dark", "Dark"]], theme, paint);
  }

  function legend() {
    $("legend").replaceChildren(...data.groups.map((group, i) => html("button", {
      type: "button", "aria-pressed": String(!view.hidden.has(group.name)), "data-name": group.name,
      onclick: () => { view.hidden.has(group.name) ? view.hidden.delete(group.name) : view.hidden.add(group.name); render(); },
    }, svg("svg", { width: 26, height: 10 }, svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, style: `stroke:${colour(i)};stroke-width:3`, "stroke-dasharray": charts.dashes(i).join(" ") })), html("span", null, ...named(group.name)))),
    ...(view.metric === "accuracy" && data.target !== null ? [html("span", { class: "goal" }, svg("svg", { width: 26, height: 10 }, svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, style: "stroke:var(--soft);stroke-width:1", "stroke-dasharray": "6 4" })), `target ${+(100 * data.target).toPrecision(4)} %`)] : []));
  }

  function curves() {
    plot($("main-plot"), view.metric, view.axis, { height: Math.max(280, Math.min(420, window.innerWidth * 0.75)), log: view.scale === "log" && view.metric !== "accuracy", empty: data.groups.some((g) => g.curves[view.metric]) ? null : "No evaluations yet." });
    const seeds = data.groups.map((g) => g.seeds.length);
    const said = { interval: ", shades their 95 % intervals (Student's t)", range: ", shades reach from the least to the most of them", none: "" }[view.band];
    const over = Math.max(...seeds) > 1 ? `Lines are means over seeds at each step${said}. ` : `One seed${seeds.length > 1 ? " each" : ""}, so no intervals. `;
    const thin = data.groups.some((g) => Object.values(g.curves).some((c) => c && c.mean.length >= data.points)) ? `At most ${data.points} points a curve are drawn.` : "";
    $("curve-note").textContent = `${over}${thin} Drag to zoom, double-click to see all.`;
  }

  function results() {
    const accuracy = data.metric === "accuracy";
    const columns = [
      [accuracy ? "Accuracy" : METRICS[data.metric] || data.metric, (r) => (r.seeds.length ? within(r.final, data.metric) : "diverged"), true],
      ["Best", (r) => maybe(r.best, (v) => upward("accuracy", v)), accuracy],
      ["Loss", (r) => maybe(r.loss, (v) => v.toFixed(4)), accuracy],
      ["Rank", (r) => maybe(r.rank, (v) => v.toFixed(1)), data.rows.length > 1],
      ["ε", (r) => maybe(r.epsilon, plain), data.rows.some((r) => r.epsilon)],
      ["δ", (r) => maybe(r.delta, plain), data.rows.some((r) => r.delta)],
      ["Seeds", (r) => (r.failed ? `${r.seeds.length + r.failed} (${r.failed} diverged)` : String(r.seeds.length)), true],
      ["Steps", (r) => (r.seeds.length ? String(r.steps) : dash), true],
      ["Up", (r) => maybe(r.bytes_up, bytes), true],
      ["Down", (r) => maybe(r.bytes_down, bytes), true],
      ["FLOPs", (r) => maybe(r.flops, count), data.rows.some((r) => r.flops)],
      ["Time", (r) => maybe(r.time, plain), true],
      ["Energy", (r) => maybe(r.energy, (v) => `${plain(+v.toPrecision(3))} J`), data.rows.some((r) => r.energy)],
    ].filter((column) => column[2]);
    $("results").replaceChildren(html("tr", null, html("th", null, ""), ...columns.map(([name]) => html("th", null, name))),
      ...data.rows.map((r, i) => line(r, i, columns.map(([, cell]) => cell(r)))));
    $("results-note").textContent = "Results are means of the last tenth of the evaluations; bytes, FLOPs and time are means over seeds of the whole run.";
  }

  const line = (r, i, cells) => html("tr", null, html("td", null, html("span", { class: "swatch", style: `background:${colour(i)}` }), ...named(r.name)), ...cells.map((c) => html("td", null, c)));

  function goal() {
    $("goal").hidden = data.target === null;
    if (data.target === null) return;
    $("goal-title").textContent = `What it took to reach ${+(100 * data.target).toPrecision(4)} %`;
    const spent = (r, axis, format) => {
      const found = r.to_target && r.to_target[axis];
      return found ? format(found.mean) + (found.half === null ? "" : ` ± ${format(found.half)}`) : dash;
    };
    $("goal-table").replaceChildren(
      html("tr", null, ...["", "Steps", "Bytes", "FLOPs", "Time", "Reached by"].map((t) => html("th", null, t))),
      ...data.rows.map((r, i) => line(r, i, [spent(r, "step", (v) => v.toFixed(1)), spent(r, "bytes", bytes), spent(r, "flops", count), spent(r, "time", (v) => plain(+v.toPrecision(3))), `${r.reached || 0} of ${r.seeds.length + (r.failed || 0)} seeds`])));
  }

  function traffic() {
    const names = [...new Set(data.groups.flatMap((g) => [...Object.keys(g.down), ...Object.keys(g.up)]))];
    const total = (way) => Object.values(way).reduce((a, b) => a + b, 0);
    const most = Math.max(1, ...data.groups.flatMap((g) => [total(g.up), total(g.down)]));
    const track = (way, text) => html("div", { class: "track" }, html("span", { class: "way" }, text), html("div", { class: "room" },
      html("div", { class: "bar", style: `flex: 0 1 ${(78 * total(way)) / most}%` }, ...Object.entries(way).map(([name, size]) =>
        html("span", { title: `${name}: ${bytes(size)}`, style: `flex:${size} 0 0;background:${shade(names.indexOf(name))}` }))),
      html("span", { class: "sum" }, bytes(total(way)))));
    $("bytes").replaceChildren(
      html("div", { class: "bars" }, ...data.groups.flatMap((g) => [html("div", { class: "who" }, ...named(g.name)), html("div", null, track(g.up, "up"), track(g.down, "down"))])),
      html("div", { class: "keys" }, ...names.map((n, i) => html("span", null, html("span", { class: "swatch", style: `background:${shade(i)}` }), n)), html("span", null, "mean over seeds of the whole run, all clients together, as encoded")),
    );
  }

  const EXTRAS = { update_norm: "Norm of updates: how far clients move from the model that they download", staleness: "Staleness: server steps between download and upload", epsilon: "Privacy: ε spent so far", ...LAST };

  function extras() {
    const present = Object.keys(EXTRAS).filter((m) => data.groups.some((g) => g.curves[m]));
    const place = $("extras");
    if (place.dataset.of !== present.join()) {
      place.dataset.of = present.join();
      place.replaceChildren(...present.map((m) => html("section", { class: "card" }, html("h2", null, EXTRAS[m]), html("div", { class: "plot", id: `plot-${m}` }))));
    }
    for (const m of present) plot($(`plot-${m}`), m, view.axis, { height: 240, log: m === "update_norm" && view.scale === "log" });
  }

  function timeline() {
    const lines = data.groups.map((g) => g.timeline).filter(Boolean), place = $("timeline-plot");
    $("timeline").hidden = !lines.length;
    if (!lines.length) return;
    view.line = Math.min(view.line, lines.length - 1);
    const line = lines[view.line];
    if (place.dataset.what !== line.name) { place.dataset.what = line.name; place.zoom = null; }
    choose("timeline-run", lines.map((l, k) => [String(k), l.name]), String(view.line), (k) => { view.line = Number(k); timeline(); });
    $("timeline-zoom").replaceChildren(...[["in", "Zoom in", 0.5], ["out", "Zoom out", 2], ["all", "All", 0]].map(([value, text, factor]) =>
      html("button", { type: "button", "data-value": value, onclick: () => (factor ? charts.zoom(place, factor, place.chart.over.clientWidth / 2, place.chart.over.clientHeight / 2) : charts.all(place)) }, text)));
    charts.timeline(place, line, {
      height: Math.max(260, Math.min(460, window.innerWidth * 0.8)), formats: { along: plain, time: AXIS_TITLES.time },
      tell: (job, u) => (job === null ? hush() : spell(u, job)),
    });
    $("timeline-key").replaceChildren("trained from a version so many steps old:", ...charts.ages(line).map(([, text, name]) => html("span", null, html("span", { class: "swatch", style: `background:var(--${name})` }), text)),
      ...(line.online ? [html("span", null, html("span", { class: "swatch", style: "background:color-mix(in srgb, var(--ink) 10%, transparent)" }), "can be reached")] : []));
    $("timeline-note").textContent = `A bar is a client at work, from fetching the model to handing in; upright lines are the server's steps. Seed ${line.seed}. ${line.note} Drag to zoom, double-click to see all; with Ctrl, or once zoomed, the wheel zooms too.`;
  }

  function spell(u, job) {
    const say = (name, text) => html("div", null, html("span", { class: "soft" }, name), html("span", { class: "num" }, text));
    tip(u, html("div", null, `client ${job.client}`), ...(job.version === null
      ? [say("at", plain(job.time)), say("doing", "nothing"), say("server at version", String(job.step))]
      : [say("from version", String(job.version)), say("uploaded at step", String(job.step + 1)), say("staleness", String(job.step - job.version)), say("began", plain(job.start_times)), say("took", plain(job.end_times - job.start_times))]));
  }

  function suspects() {
    const tables = data.suspects || [];
    $("suspects").hidden = !tables.length;
    $("suspects-tables").replaceChildren(...tables.map((t) => {
      const middle = (values) => (values.length ? [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] : null);
      const every = t.rows.flatMap((r) => r.norm.filter((v) => v !== null)), top = Math.max(1e-30, ...every);
      const trace = (r, values, low, high) => svg("svg", { width: 150, height: 26, role: "img", "aria-label": `client ${r.client} by step` },
        ...r.suspected.map((s) => svg("line", { x1: (150 * s) / t.last, x2: (150 * s) / t.last, y1: 0, y2: 26, style: "stroke:var(--c1);stroke-width:1;opacity:0.35" })),
        svg("polyline", { points: r.steps.map((s, k) => (values[k] === null ? "" : `${((150 * s) / t.last).toFixed(1)},${(24 - (22 * (values[k] - low)) / (high - low)).toFixed(1)}`)).join(" "), style: "fill:none;stroke:var(--c0);stroke-width:1.5" }));
      return html("div", null, html("h3", null, t.name),
        html("div", { class: "cut" }, html("div", { class: "scroll", tabindex: "0", style: "max-height:30em" }, html("table", null,
          html("tr", null, ...["client", "suspected", "rejected", "norm", "norms", "cosine", "cosines"].map((k) => html("th", null, k))),
          ...t.rows.map((r) => html("tr", null, html("td", null, String(r.client)), html("td", { class: "num" }, String(r.suspected.length)), html("td", { class: "num" }, String(r.rejected)),
            html("td", { class: "num" }, maybe(middle(r.norm), (v) => plain(+v.toPrecision(3)))), html("td", null, trace(r, r.norm, 0, top)),
            html("td", { class: "num" }, maybe(middle(r.cosine), (v) => v.toFixed(2))), html("td", null, trace(r, r.cosine, -1, 1))))))),
        html("p", { class: "soft note" }, `Most often suspected first: farther from the rule's result than twice the median client, in steps marked by upright lines. Norms (from 0 to ${plain(+top.toPrecision(3))}) and cosines with the result (−1 to 1) run over the steps; medians beside them. Seed ${t.seed}.${t.count > t.rows.length ? ` The first ${t.rows.length} of ${t.count} clients are shown.` : ""}`));
    }));
  }

  function clients() {
    const tables = data.clients || [];
    $("clients").hidden = !tables.length;
    $("clients-tables").replaceChildren(...tables.map((t) => {
      const keys = Object.keys(t.rows[0] || {});
      const say = (k, v) => (v === null || v === undefined ? dash : typeof v === "string" ? v : Number.isInteger(v) ? String(v) : inPercent(k) ? `${(100 * v).toFixed(1)} %` : v.toFixed(4));
      return html("div", null, html("h3", null, t.name),
        html("div", { class: "cut" }, html("div", { class: "scroll", tabindex: "0", style: "max-height:24em" }, html("table", null,
          html("tr", null, ...keys.map((k) => html("th", null, k))),
          ...t.rows.map((r, i) => html("tr", i < t.worst ? { class: "worst" } : null, ...keys.map((k) => html("td", k === "name" ? null : { class: "num" }, say(k, r[k])))))))),
        html("p", { class: "soft note" }, `${t.count} clients by ${t.by}, worst first; seed ${t.seed}. Mean ${say(t.by, t.mean)}, worst tenth (${t.worst}, marked) ${say(t.by, t.worst_mean)}.${t.undefined ? ` ${t.by} is undefined for ${t.undefined} clients, which come last and are not in the means.` : ""}${t.count > t.rows.length ? ` The first ${t.rows.length} are shown.` : ""}`));
    }));
  }

  function partition() {
    const place = $("partition"), part = data.partition;
    if (!part.counts) return place.replaceChildren(html("p", { class: "soft" }, part.note));
    const clients = part.counts.length, labels = part.counts[0].length;
    const sheet = html("canvas", { width: clients, height: labels, role: "img", "aria-label": "samples of each label by client", style: `height:${Math.max(140, 14 * Math.min(labels, 24))}px` });
    const pen = sheet.getContext("2d"), most = Math.max(...part.counts.flat());
    const hot = getComputedStyle(document.documentElement).getPropertyValue("--hot");
    part.counts.forEach((row, i) => row.forEach((n, j) => { if (n) { pen.fillStyle = `rgba(${hot}, ${0.12 + 0.88 * (n / most)})`; pen.fillRect(i, labels - 1 - j, 1, 1); } }));
    const every = Math.ceil(labels / 16);
    const side = html("div", { class: "labels" }, ...[...Array(labels).keys()].reverse().filter((j) => j % every === 0).map((j) => html("span", null, String(j))));
    place.replaceChildren(html("div", { class: "frame" }, side, sheet,
      html("div", { class: "below" }, html("span", null, "client 0"), html("span", null, `client ${part.clients - 1}`))),
      html("p", { class: "soft note" }, "0", html("span", { class: "ramp" }), `${most} samples of a label (rows are labels, columns clients). ${part.note}`));
  }

  function commands() {
    $("commands").replaceChildren(...data.groups.map((g) => html("div", { class: "command" },
      html("div", { class: "head" }, html("span", null, ...named(g.name)), g.command ? html("button", { type: "button", onclick: (event) => copy(event.currentTarget, g.command) }, "Copy") : null),
      g.command ? html("pre", null, ...typed(g.command)) : html("p", { class: "soft" }, g.why))));
  }

  function copy(button, text) {
    const said = (word) => { button.textContent = word; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text).then(() => said("Copied"), () => select(button, said));
    select(button, said);
  }

  function select(button, said) {
    const range = document.createRange();
    range.selectNodeContents(button.closest(".command").querySelector("pre"));
    const chosen = window.getSelection();
    chosen.removeAllRanges();
    chosen.addRange(range);
    said(document.execCommand("copy") ? "Copied" : "Selected");
  }

  function settings() {
    const found = [...new Set(data.groups.flatMap((g) => Object.keys(g.settings)))];
    const same = (k) => data.groups.length > 1 && new Set(data.groups.map((g) => String(g.settings[k]))).size === 1;
    const keys = [...found.filter((k) => !same(k)), ...found.filter(same)];
    $("settings").className = data.groups.length > 1 ? "" : "alone";
    $("settings").replaceChildren(
      html("tr", null, html("th", null, ""), ...data.groups.map((g) => html("th", null, ...named(g.name)))),
      ...keys.map((k) => html("tr", null, html("td", null, k), ...(same(k)
        ? [html("td", { colspan: data.groups.length }, `all: ${data.groups[0].settings[k]}`)]
        : data.groups.map((g) => html("td", null, g.settings[k] === undefined ? dash : String(g.settings[k])))))),
    );
  }

  function fleets() {
    $("fleets").hidden = !data.fleets.length;
    $("fleets").replaceChildren(html("h2", null, "The fleet"), ...data.fleets.flatMap(fleet));
  }

  function fleet(f) {
    const waits = f.wait && `Waiting for ${f.wait}, for ${f.since} s so far${f.left === null ? ", as long as it takes" : `, ${Math.max(0, f.left)} s more`}.`;
    const asked = (n) => (n.asked === null ? "idle" : `asked ${n.asked} s ago, no answer yet`);
    const cells = (tag, ...texts) => html("tr", null, ...texts.map((t) => html(tag, null, t)));
    return [
      html("p", null, f.silent !== null ? `${f.name}: ${f.state}.` : `${data.fleets.length > 1 ? `${f.name}: ` : ""}${f.state}, ${f.nodes} of ${f.fleet.length + f.more} nodes connected. ${waits}`),
      f.silent === null ? null : html("p", { class: "bad" }, `The server was last heard of ${f.silent} s ago; see: fedbraid deploy doctor`),
      html("div", { class: "cut" }, html("div", { class: "scroll", tabindex: "0" }, html("table", null, cells("th", "node", "client", "connected", "order"),
        ...f.fleet.map((n) => cells("td", n.name, n.client < 0 ? dash : String(n.client), n.here ? "yes" : n.seen === null ? "no" : `no, last seen ${n.seen} s ago`, asked(n)))))),
      f.more ? html("p", { class: "soft note" }, `and ${f.more} more`) : null,
      ...f.trouble.map((t) => html("p", { class: "bad" }, `${t.node}: ${t.why} (${t.times} times)`)),
      f.error ? html("pre", null, f.error) : null,
    ].filter((part) => part !== null);
  }

  function heading() {
    AXIS_TITLES.time = data.real ? "time, seconds" : "simulated time";
    $("title").replaceChildren(...named(data.title));
    $("task").textContent = data.task;
    $("verdict").textContent = data.verdict;
    $("verdict").hidden = !data.verdict;
    $("footer").textContent = data.footer;
    fleets();
    if (!data.live) return;
    if (data.finished) status("finished", "finished");
    else if (data.fleets.some((f) => f.silent !== null)) status("lost", `${data.progress}; the server was last heard of ${lasting(Math.max(...data.fleets.map((f) => f.silent)))} ago`);
    else if (data.silent === null) status("running", `running: ${data.progress}`);
    else status("lost", `${data.progress}, and no step for ${lasting(data.silent)}. If it was stopped: ${data.again}`);
  }

  function status(state, text) { $("status").hidden = false; $("status").dataset.state = state; $("status").textContent = text; }

  function drawings() { curves(); extras(); timeline(); }
  function render() { heading(); controls(); legend(); drawings(); results(); goal(); traffic(); suspects(); clients(); partition(); commands(); settings(); hints(); }

  // A table that is cut on its right says so.
  function hints() {
    for (const box of document.querySelectorAll(".scroll")) {
      const look = () => { box.parentElement.dataset.more = String(box.scrollWidth - box.clientWidth - box.scrollLeft > 4); };
      box.onscroll = look;
      look();
    }
  }

  function paint(theme) { document.documentElement.dataset.theme = theme; render(); }

  // Watching -----------------------------------------------------------------------------------------

  async function follow() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      data = await answer.json();
      const news = JSON.stringify({ ...data, fleets: null, silent: null });  // whose seconds go on
      if (news !== follow.last) { follow.last = news; render(); }
      else { heading(); hints(); }
    } catch (error) {
      status("lost", "no answer from fedbraid watch");
    }
    setTimeout(follow, data.finished ? 10000 : data.every);
  }

  let size = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== size) { size = document.body.clientWidth; drawings(); hints(); } }).observe(document.body);
  paint(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (data.live) setTimeout(follow, data.every);
})();
