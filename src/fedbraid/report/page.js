"use strict";
(() => {
  const AXES = { step: "Rounds", bytes: "Bytes", time: "Time", flops: "FLOPs" };
  const AXIS_TITLES = { step: "server steps", bytes: "bytes up and down", time: "simulated time", flops: "FLOPs on clients" };
  const METRICS = { accuracy: "Test accuracy", loss: "Test loss", train_loss: "Training loss", drift: "Drift", staleness: "Staleness" };
  const DASHES = ["", "7 4", "2 4", "10 3 2 3"];
  const COLOURS = 7;
  const $ = (id) => document.getElementById(id);
  let data = JSON.parse($("data").textContent);
  const view = { axis: "step", metric: data.metric, scale: "linear", hidden: new Set() };

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
  const upward = (metric, v) => (metric === "accuracy" ? `${(100 * v).toFixed(2)} %` : plain(v));
  const dash = "–";
  const maybe = (v, format) => (v === null || v === undefined ? dash : format(v));

  function within(interval, metric) {
    if (!interval) return dash;
    const percent = metric === "accuracy";
    const one = (v) => (percent ? (100 * v).toFixed(2) : v.toFixed(4));
    return one(interval.mean) + (interval.half === null ? "" : ` ± ${one(interval.half)}`) + (percent ? " %" : "");
  }

  function ticks(low, high, wanted) {
    const raw = (high - low) / Math.max(1, wanted);
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find((m) => m * unit >= raw * 0.999) * unit;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(+(i * step).toPrecision(12));
    return found;
  }

  function powers(low, high) {
    const found = [];
    const factors = Math.log10(high / low) > 2.5 ? [1] : [1, 2, 5];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const m of factors) { const v = +(m * 10 ** e).toPrecision(6); if (v >= low * 0.999 && v <= high * 1.001) found.push(v); }
    return found;
  }

  // Charts -------------------------------------------------------------------------------------------

  const colour = (i) => `var(--c${i % COLOURS})`;
  const shade = (i) => `color-mix(in srgb, var(--ink) ${[78, 48, 28, 62, 14, 38][i % 6]}%, var(--card))`;
  const dashes = (i) => DASHES[Math.floor(i / COLOURS) % DASHES.length] || null;

  function series(metric, axis) {
    return data.groups
      .map((group, i) => ({ i, name: group.name, curve: group.curves[metric] }))
      .filter((s) => s.curve && s.curve.x[axis] && !view.hidden.has(s.name));
  }

  function plot(place, metric, axis, options) {
    const width = Math.max(260, place.clientWidth), height = options.height;
    const shown = series(metric, axis);
    const label = `${METRICS[metric] || metric} over ${AXIS_TITLES[axis]}`;
    if (!shown.length) return place.replaceChildren(html("p", { class: "empty" }, options.empty || "Nothing to draw: every curve is hidden."));
    const log = options.log && shown.every((s) => s.curve.mean.every((v) => v > 0));
    const xs = shown.flatMap((s) => s.curve.x[axis]);
    const ends = shown.flatMap((s) => s.curve.mean.flatMap((v, j) => [v - (s.curve.half ? s.curve.half[j] : 0), v + (s.curve.half ? s.curve.half[j] : 0)]));
    const means = shown.flatMap((s) => s.curve.mean);
    let x1 = Math.max(...xs), x0 = Math.min(0, ...xs);
    if (x1 === x0) x1 = x0 + 1;
    // a band may be far wider than the curves are high; it is cut there rather than flattening them
    const spread = Math.max(...means) - Math.min(...means) || Math.abs(means[0]) * 0.1 || 1;
    let y0 = Math.max(Math.min(...ends), Math.min(...means) - 0.6 * spread), y1 = Math.min(Math.max(...ends), Math.max(...means) + 0.6 * spread);
    if (metric === "accuracy") { y0 = Math.max(0, y0); y1 = Math.min(1, y1); }
    if (log) { y0 = Math.max(y0, Math.min(...means) * 0.7); } else if (metric !== "accuracy") y0 = Math.max(y0, 0);
    if (y1 <= y0) y1 = y0 + (Math.abs(y0) * 0.1 || 1);
    if (!log) { const pad = 0.03 * (y1 - y0); y0 = metric === "accuracy" ? Math.max(0, y0 - pad) : y0 - (y0 > 0 ? Math.min(pad, y0) : 0); y1 = metric === "accuracy" ? Math.min(1, y1 + pad) : y1 + pad; }
    const yTicks = log ? powers(y0, y1) : ticks(y0, y1, Math.round(height / 60));
    const yLabel = (v) => (metric === "accuracy" ? `${+(100 * v).toPrecision(4)} %` : plain(v));
    const left = 14 + 7.2 * Math.max(...yTicks.map((v) => yLabel(v).length), 3), right = 16, top = 26, bottom = 42;
    const X = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
    const scale = (v) => (log ? Math.log(Math.max(v, y0 * 1e-3)) : v);
    const Y = (v) => height - bottom - ((scale(v) - scale(y0)) / (scale(y1) - scale(y0))) * (height - top - bottom);
    const clip = `clip-${options.id}`;
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
    drawn.append(svg("clipPath", { id: clip }, svg("rect", { x: left, y: top - 4, width: width - left - right + 4, height: height - top - bottom + 8 })));
    for (const v of yTicks) {
      drawn.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }));
      drawn.append(svg("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, yLabel(v)));
    }
    for (const v of ticks(x0, x1, Math.max(2, Math.floor((width - left) / 110)))) {
      const near = X(v) > width - 34;
      drawn.append(svg("line", { class: "base", x1: X(v), x2: X(v), y1: height - bottom, y2: height - bottom + 5 }));
      drawn.append(svg("text", { x: near ? width - 2 : X(v), y: height - bottom + 19, "text-anchor": near ? "end" : "middle" }, along(axis, v)));
    }
    drawn.append(svg("line", { class: "base", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    drawn.append(svg("text", { x: left + (width - left - right) / 2, y: height - 4, "text-anchor": "middle" }, AXIS_TITLES[axis]));
    drawn.append(svg("text", { x: 0, y: 12 }, (METRICS[metric] || metric) + (log ? ", log scale" : "")));
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    for (const s of shown) if (s.curve.half) {
      const at = (j, sign) => `${X(s.curve.x[axis][j]).toFixed(1)},${Y(s.curve.mean[j] + sign * s.curve.half[j]).toFixed(1)}`;
      const order = s.curve.mean.map((_, j) => j);
      inside.append(svg("path", { class: "band", "data-name": s.name, style: `fill:${colour(s.i)}`, d: `M${order.map((j) => at(j, 1)).join("L")}L${order.reverse().map((j) => at(j, -1)).join("L")}Z` }));
    }
    for (const s of shown) {
      const points = s.curve.mean.map((v, j) => `${X(s.curve.x[axis][j]).toFixed(1)},${Y(v).toFixed(1)}`);
      inside.append(svg("path", { class: "curve", "data-name": s.name, style: `stroke:${colour(s.i)}`, "stroke-dasharray": dashes(s.i), d: `M${points.join("L")}` }));
      if (points.length === 1) { const [cx, cy] = points[0].split(","); inside.append(svg("circle", { cx, cy, r: 3.5, style: `fill:${colour(s.i)}` })); }
    }
    const guide = svg("line", { class: "guide", y1: top, y2: height - bottom, visibility: "hidden" });
    drawn.append(inside, guide);
    if (metric === "accuracy" && data.target !== null && data.target >= y0 && data.target <= y1) {
      const under = shown.every((s) => s.curve.mean[s.curve.mean.length - 1] < data.target); // its text keeps clear of where curves end
      drawn.append(svg("line", { class: "goal", x1: left, x2: width - right, y1: Y(data.target), y2: Y(data.target) }));
      drawn.append(svg("text", { class: "halo", x: width - right, y: Y(data.target) + (under ? -6 : 15), "text-anchor": "end" }, `target ${+(100 * data.target).toPrecision(4)} %`));
    }
    drawn.addEventListener("pointermove", (event) => {
      const box = drawn.getBoundingClientRect();
      const value = x0 + ((event.clientX - box.left - left) / (width - left - right)) * (x1 - x0);
      if (value < x0 - 0.02 * (x1 - x0) || value > x1 * 1.02) return leave();
      tell(event, metric, axis, shown, Math.min(x1, Math.max(x0, value)));
      const at = X(Math.min(x1, Math.max(x0, value)));
      guide.setAttribute("x1", at); guide.setAttribute("x2", at); guide.setAttribute("visibility", "visible");
    });
    const leave = () => { $("tip").hidden = true; guide.setAttribute("visibility", "hidden"); };
    drawn.addEventListener("pointerleave", leave);
    drawn.addEventListener("pointercancel", leave);
    place.replaceChildren(drawn);
  }

  function tell(event, metric, axis, shown, value) {
    const lines = [];
    for (const s of shown) {
      const xs = s.curve.x[axis];
      if (value > xs[xs.length - 1] * 1.02) continue;
      let j = 0;
      while (j < xs.length - 1 && Math.abs(xs[j + 1] - value) <= Math.abs(xs[j] - value)) j += 1;
      lines.push([s, s.curve.mean[j], s.curve.half ? s.curve.half[j] : null]);
    }
    lines.sort((a, b) => (!METRICS[metric] || metric === "accuracy" ? b[1] - a[1] : a[1] - b[1]));
    const tip = $("tip");
    tip.replaceChildren(
      html("div", { class: "soft" }, `${along(axis, axis === "step" ? Math.round(value) : value)} ${axis === "bytes" ? "" : AXIS_TITLES[axis]}`.trim()),
      ...lines.map(([s, v, half]) => html("div", null,
        html("span", { class: "who" }, html("span", { class: "swatch", style: `background:${colour(s.i)}` }), s.name),
        html("span", { class: "num" }, upward(metric, v) + (half === null ? "" : ` ± ${metric === "accuracy" ? (100 * half).toFixed(2) : plain(half)}`)))),
    );
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 16 + box.width > window.innerWidth ? event.clientX - box.width - 16 : event.clientX + 16;
    tip.style.left = `${Math.max(4, x)}px`;
    tip.style.top = `${Math.min(window.innerHeight - box.height - 4, event.clientY + 12)}px`;
  }

  // Parts of the page --------------------------------------------------------------------------------

  function controls() {
    const own = new Set(data.groups.flatMap((g) => Object.keys(g.curves)).filter((m) => !METRICS[m]));
    const metrics = ["accuracy", ...own, "loss", "train_loss"].filter((m) => data.groups.some((g) => g.curves[m]));
    if (!metrics.includes(view.metric) && metrics.length) view.metric = metrics[0];
    const axes = Object.keys(AXES).filter((a) => data.groups.some((g) => Object.values(g.curves).some((c) => c && c.x[a])));
    if (!axes.includes(view.axis) && axes.length) view.axis = axes[0];
    choose("metric", metrics.map((m) => [m, METRICS[m] || m]), view.metric, (m) => { view.metric = m; render(); });
    choose("axis", axes.map((a) => [a, AXES[a]]), view.axis, (a) => { view.axis = a; render(); });
    choose("scale", view.metric === "accuracy" ? [] : [["linear", "Linear"], ["log", "Log"]], view.scale, (s) => { view.scale = s; render(); });
    const theme = document.documentElement.dataset.theme;
    choose("theme", [["light", "Light"], ["dark", "Dark"]], theme, paint);
  }

  function legend() {
    $("legend").replaceChildren(...data.groups.map((group, i) => html("button", {
      type: "button", "aria-pressed": String(!view.hidden.has(group.name)), "data-name": group.name,
      onclick: () => { view.hidden.has(group.name) ? view.hidden.delete(group.name) : view.hidden.add(group.name); render(); },
    }, svg("svg", { width: 26, height: 10 }, svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, style: `stroke:${colour(i)};stroke-width:3`, "stroke-dasharray": dashes(i) })), group.name)));
  }

  function curves() {
    plot($("main-plot"), view.metric, view.axis, { id: "main", height: Math.max(280, Math.min(420, window.innerWidth * 0.75)), log: view.scale === "log" && view.metric !== "accuracy", empty: data.groups.some((g) => g.curves[view.metric]) ? null : "No evaluations yet." });
    const seeds = data.groups.map((g) => g.seeds.length);
    const over = Math.max(...seeds) > 1 ? "Lines are means over seeds at each step, shades their 95 % intervals (Student's t). " : "One seed each, so no intervals. ";
    const thin = data.groups.some((g) => Object.values(g.curves).some((c) => c && c.mean.length >= data.points)) ? `At most ${data.points} points a curve are drawn.` : "";
    $("curve-note").textContent = over + thin;
  }

  function results() {
    const accuracy = data.metric === "accuracy";
    const columns = [
      [accuracy ? "Accuracy" : METRICS[data.metric] || data.metric, (r) => within(r.final, data.metric), true],
      ["Best", (r) => maybe(r.best, (v) => upward("accuracy", v)), accuracy],
      ["Loss", (r) => maybe(r.loss, (v) => v.toFixed(4)), accuracy],
      ["Rank", (r) => maybe(r.rank, (v) => v.toFixed(1)), data.rows.length > 1],
      ["Seeds", (r) => String(r.seeds.length) + (r.failed ? ` (${r.failed} diverged)` : ""), true],
      ["Steps", (r) => String(r.steps), true],
      ["Up", (r) => maybe(r.bytes_up, bytes), true],
      ["Down", (r) => maybe(r.bytes_down, bytes), true],
      ["FLOPs", (r) => maybe(r.flops, count), data.rows.some((r) => r.flops)],
      ["Time", (r) => maybe(r.time, plain), true],
    ].filter((column) => column[2]);
    $("results").replaceChildren(html("tr", null, html("th", null, ""), ...columns.map(([name]) => html("th", null, name))),
      ...data.rows.map((r, i) => line(r, i, columns.map(([, cell]) => cell(r)))));
    $("results-note").textContent = "Results are means of the last tenth of the evaluations; bytes, FLOPs and simulated time are means over seeds of the whole run.";
  }

  const line = (r, i, cells) => html("tr", null, html("td", null, html("span", { class: "swatch", style: `background:${colour(i)}` }), r.name), ...cells.map((c) => html("td", null, c)));

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
      ...data.rows.map((r, i) => line(r, i, [spent(r, "step", (v) => v.toFixed(1)), spent(r, "bytes", bytes), spent(r, "flops", count), spent(r, "time", (v) => plain(+v.toPrecision(3))), `${r.reached || 0} of ${r.seeds.length} seeds`])));
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
      html("div", { class: "bars" }, ...data.groups.flatMap((g) => [html("div", { class: "who" }, g.name), html("div", null, track(g.up, "up"), track(g.down, "down"))])),
      html("div", { class: "keys" }, ...names.map((n, i) => html("span", null, html("span", { class: "swatch", style: `background:${shade(i)}` }), n)), html("span", null, "mean over seeds of the whole run, all clients together, as encoded")),
    );
  }

  const EXTRAS = { drift: "How far clients drift: the mean norm of their updates", staleness: "Staleness: server steps between fetching and handing in" };

  function extras() {
    const present = Object.keys(EXTRAS).filter((m) => data.groups.some((g) => g.curves[m]));
    const place = $("extras");
    if (place.dataset.of !== present.join()) {
      place.dataset.of = present.join();
      place.replaceChildren(...present.map((m) => html("section", { class: "card" }, html("h2", null, EXTRAS[m]), html("div", { class: "plot", id: `plot-${m}` }))));
    }
    for (const m of present) plot($(`plot-${m}`), m, view.axis, { id: m, height: 240, log: m === "drift" && view.scale === "log" });
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
      html("div", { class: "head" }, html("span", null, g.name), g.command ? html("button", { type: "button", onclick: (event) => copy(event.currentTarget, g.command) }, "Copy") : null),
      g.command ? html("pre", null, g.command) : html("p", { class: "soft" }, "Its task, cohorts or algorithm were made in Python; no command says them."))));
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
    const keys = [...new Set(data.groups.flatMap((g) => Object.keys(g.settings)))];
    $("settings").replaceChildren(
      html("tr", null, html("th", null, ""), ...data.groups.map((g) => html("th", null, g.name))),
      ...keys.map((k) => html("tr", null, html("td", null, k), ...data.groups.map((g) => html("td", null, g.settings[k] === undefined ? dash : String(g.settings[k]))))),
    );
  }

  function heading() {
    $("title").textContent = data.title;
    $("task").textContent = data.task;
    $("verdict").textContent = data.verdict;
    $("verdict").hidden = !data.verdict;
    $("footer").textContent = data.footer;
    if (data.live) status(data.finished ? "finished" : "running", data.finished ? "finished" : `running: ${data.progress}`);
  }

  function status(state, text) { $("status").hidden = false; $("status").dataset.state = state; $("status").textContent = text; }

  function charts() { curves(); extras(); }
  function render() { heading(); controls(); legend(); charts(); results(); goal(); traffic(); partition(); commands(); settings(); }

  function paint(theme) { document.documentElement.dataset.theme = theme; render(); }

  // Watching -----------------------------------------------------------------------------------------

  async function follow() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      const news = await answer.text();
      if (news !== follow.last) { follow.last = news; data = JSON.parse(news); render(); }
      else heading();
    } catch (error) {
      status("lost", "no answer from fedbraid watch");
    }
    setTimeout(follow, data.finished ? 10000 : data.every);
  }

  let size = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== size) { size = document.body.clientWidth; charts(); } }).observe(document.body);
  paint(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (data.live) setTimeout(follow, data.every);
})();
