"use strict";
// Curves and the timeline, drawn by uPlot: what is ours is which lines there are, their names, and what the cursor tells.
const charts = (() => {
  const DASHES = [[], [7, 4], [2, 4], [10, 3, 2, 3], [14, 4], [4, 2, 1, 2]];
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const paint = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const dashes = (i) => DASHES[i % DASHES.length];
  const colour = (i) => `c${i % 7}`;

  function faded(hex, alpha) {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
  }

  // there is no half a step
  const WHOLE = Array.from({ length: 10 }, (_, k) => [1, 2, 5].map((v) => v * 10 ** k)).flat();

  const axis = (format, more) => ({
    stroke: paint("soft"), font: FONT, labelFont: FONT, labelSize: 20,
    grid: { stroke: paint("grid"), width: 1 }, ticks: { stroke: paint("line"), width: 1, size: 5 },
    values: (_, splits) => splits.map((v) => (v === null ? null : format(v))), ...more,
  });

  // A chart at its place; what it was zoomed to stays when it is drawn anew.
  function put(place, options, table) {
    const kept = place.zoom;
    if (place.chart) place.chart.destroy();
    place.replaceChildren();
    place.chart = new uPlot({
      ...options,
      legend: { show: false },
      hooks: {
        ...options.hooks,
        setSelect: [(u) => { if (u.select.width > 0) place.zoom = true; }],
        setScale: [(u) => { if (place.zoom) place.zoom = { x: { ...range(u, "x") }, y: { ...range(u, "y") } }; place.dataset.zoomed = String(Boolean(place.zoom)); }],
      },
    }, table, place);
    place.chart.over.addEventListener("dblclick", () => all(place));
    if (kept && kept.x) { place.zoom = kept; place.chart.setScale("x", kept.x); if (options.free) place.chart.setScale("y", kept.y); }
  }

  const range = (u, key) => ({ min: u.scales[key].min, max: u.scales[key].max });

  function all(place) {
    place.zoom = null;
    place.chart.batch(() => { for (const [key, ends] of Object.entries(place.whole)) place.chart.setScale(key, ends); });
    place.dataset.zoomed = "false";
  }

  // By a factor around a point of the plot, in its pixels.
  function zoom(place, factor, left, top, keys = ["x", "y"]) {
    const u = place.chart;
    place.zoom = place.zoom || true;
    u.batch(() => {
      for (const key of keys.filter((k) => place.whole[k])) {
        const at = u.posToVal(key === "x" ? left : top, key), { min, max } = range(u, key), whole = place.whole[key];
        const ends = { min: Math.max(whole.min, at - (at - min) * factor), max: Math.min(whole.max, at + (max - at) * factor) };
        u.setScale(key, ends);
      }
    });
  }

  // Curves -------------------------------------------------------------------------------------------

  function curves(place, { shown, axis: along, metric, log, band, target, height, formats, label, tell }) {
    const width = Math.max(260, place.clientWidth);
    const tables = shown.map((s) => [s.curve.x[along], s.curve.mean, ...ends(s.curve, band, metric)]);
    const joined = uPlot.join(tables);
    const series = [{}], bands = [];
    shown.forEach((s, k) => {
      const line = { scale: "y", spanGaps: true, label: s.name, stroke: paint(colour(s.i)), width: 2, dash: dashes(s.i), points: { show: s.curve.mean.length === 1, size: 8, fill: paint(colour(s.i)) } };
      series.push(line);
      if (tables[k].length > 2) {
        const edge = { ...line, label: "band", stroke: "transparent", width: 0, dash: [], points: { show: false } };
        bands.push({ series: [series.length, series.length + 1], fill: faded(paint(colour(s.i)), 0.13) });
        series.push(edge, { ...edge });
      }
    });
    const xs = joined[0], x1 = xs[xs.length - 1], x0 = Math.min(0, xs[0]);
    place.whole = { x: { min: x0, max: x1 > x0 ? x1 : x0 + 1 } };
    const names = width >= 640 && shown.length > 1 && shown.length <= 12;
    const room = names ? Math.min(170, 22 + Math.max(...shown.map((s) => written(short(s.name))))) : 14;
    put(place, {
      width, height, series, bands,
      padding: [10, room, 0, 0],
      scales: { x: { time: false, range: (u, min, max) => (place.zoom ? [min, max] : [place.whole.x.min, place.whole.x.max]) }, y: { distr: log ? 3 : 1, range: (u) => upright(u, shown, along, metric, log, band) } },
      axes: [
        axis(formats.along, { size: 30, space: along === "bytes" || along === "flops" ? 90 : 60, label: label.along, ...(along === "step" ? { incrs: WHOLE } : {}) }),
        axis(formats.up, { size: (u, values) => 14 + 7.2 * Math.max(3, ...(values || []).map((v) => String(v ?? "").length)), space: 44 }),
      ],
      cursor: { drag: { x: true, y: false }, points: { show: false }, y: false },
      hooks: {
        draw: [(u) => { if (target !== null) level(u, target); place.labels = names ? direct(u, shown, along, room) : []; }],
        setCursor: [(u) => { if (u.cursor.left < 0) tell(null); else tell(u.posToVal(u.cursor.left, "x"), u); }],
      },
    }, joined);
    place.chart.over.addEventListener("mouseleave", () => tell(null));
  }

  function ends(curve, band, metric) {
    if (band === "none" || !curve.half) return [];
    const top = metric === "accuracy" ? 1 : Infinity;
    const bottom = metric === "update_norm" ? -Infinity : 0;
    const cut = (v) => Math.min(top, Math.max(bottom, v));
    if (band === "range") return [curve.high.map(cut), curve.low.map(cut)];
    return [curve.mean.map((v, j) => cut(v + curve.half[j])), curve.mean.map((v, j) => cut(v - curve.half[j]))];
  }

  // From the least to the most of the lines in view; a band may be far wider, and is then cut rather than flattening them.
  function upright(u, shown, along, metric, log, band) {
    const { min, max } = range(u, "x"), lines = [], edges = [];
    for (const s of shown) {
      const [high, low] = ends(s.curve, band, metric);
      s.curve.x[along].forEach((x, j) => {
        if (min !== null && (x < min || x > max)) return;
        lines.push(s.curve.mean[j]);
        if (high) edges.push(high[j], low[j]);
      });
    }
    if (!lines.length) return [0, 1];
    const least = Math.min(...lines), most = Math.max(...lines), spread = most - least || Math.abs(least) * 0.1 || 1;
    let y0 = Math.max(Math.min(least, ...edges), least - 0.6 * spread), y1 = Math.min(Math.max(most, ...edges), most + 0.6 * spread);
    if (log) return [Math.max(y0, least * 0.7) * 0.95, y1 * 1.05];
    if (y1 <= y0) { y0 -= spread / 2; y1 += spread / 2; }
    const pad = 0.03 * (y1 - y0);
    const floor = least >= 0 ? 0 : -Infinity;
    return [Math.max(floor, y0 - pad), metric === "accuracy" ? Math.min(1.005, y1 + pad) : y1 + pad];
  }

  function level(u, target) {
    const y = u.valToPos(target, "y", true), { left, top, width, height } = u.bbox;
    if (y < top || y > top + height) return;
    const pen = u.ctx;
    pen.save();
    pen.strokeStyle = paint("soft");
    pen.lineWidth = devicePixelRatio;
    pen.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(left + width, y); pen.stroke();
    pen.restore();
  }

  const sheet = document.createElement("canvas").getContext("2d");
  function written(text) { sheet.font = FONT; return sheet.measureText(text).width; }
  const short = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);

  // Names at the ends of the lines, moved apart where lines end together.
  function direct(u, shown, along, room) {
    const tall = 15, { left, top, width, height } = u.bbox, scale = devicePixelRatio;
    const labels = shown.map((s) => {
      const xs = s.curve.x[along], j = last(xs, u.scales.x.max);
      return { text: short(s.name), i: s.i, y: j < 0 ? top / scale : u.valToPos(s.curve.mean[j], "y", true) / scale };
    }).sort((a, b) => a.y - b.y);
    const low = top / scale + 6, high = (top + height) / scale - 4;
    labels.forEach((l, k) => { l.y = Math.max(l.y, k ? labels[k - 1].y + tall : low); });
    for (let k = labels.length - 1; k >= 0; k -= 1) labels[k].y = Math.min(labels[k].y, k < labels.length - 1 ? labels[k + 1].y - tall : high);
    const pen = u.ctx, x = (left + width) / scale + 8;
    pen.save();
    pen.scale(scale, scale);
    pen.font = FONT; pen.textBaseline = "middle"; pen.textAlign = "left";
    for (const l of labels) { pen.fillStyle = paint(colour(l.i)); pen.fillText(l.text, x, l.y); l.x = x; l.right = x + written(l.text); }
    pen.restore();
    return labels;
  }

  function last(xs, end) { let j = xs.length - 1; while (j >= 0 && xs[j] > end) j -= 1; return j; }

  // Timeline -----------------------------------------------------------------------------------------

  // Classes of staleness: from, the class's name, and its colour. Each is twice as wide as the one before it, and the first so
  // wide that no more than a tenth of the jobs is left to the last.
  function ages({ jobs: { step, version } }) {
    const stale = step.map((s, j) => s - version[j]);
    let unit = 1;
    while (stale.filter((s) => s >= 16 * unit).length > stale.length / 10) unit *= 2;
    const from = [0, 1, 2, 4, 8, 16].map((k) => k * unit);
    const named = (a, b) => (b === undefined ? `${a} or more` : b - a === 1 ? String(a) : `${a}–${b - 1}`);
    return from.map((a, k) => [a, named(a, from[k + 1]), `a${k}`]);
  }
  const aged = (stale, classes) => { let k = 0; while (k < classes.length - 1 && stale >= classes[k + 1][0]) k += 1; return k; };

  function timeline(place, line, { height, formats, tell }) {
    const width = Math.max(260, place.clientWidth), jobs = prepared(line);
    const named = Object.keys(line.names || {}).length > 0, name = (v) => (line.names || {})[v] || String(v);
    const end = Math.max(jobs.end, line.steps[line.steps.length - 1] || 1);
    place.whole = { x: { min: 0, max: end }, y: { min: -0.5, max: line.clients - 0.5 } };
    const free = (key) => (u, min, max) => (place.zoom ? [min, max] : [place.whole[key].min, place.whole[key].max]);
    put(place, {
      width, height, free: true,
      series: [{}, { scale: "y", points: { show: false } }],
      padding: [10, 14, 0, 0],
      scales: { x: { time: false, range: free("x") }, y: { range: free("y") } },
      axes: [
        axis(formats.along, { label: formats.time, size: 30, space: 60 }),
        axis((v) => (Number.isInteger(v) ? name(v) : ""), { label: named ? "node" : "client", size: named ? 84 : 46, space: 30, grid: { show: false } }),
      ],
      cursor: { drag: { x: true, y: true, uni: 20 }, points: { show: false } },
      hooks: {
        draw: [(u) => segments(u, jobs, line, place)],
        setCursor: [(u) => tell(u.cursor.left < 0 ? null : near(u, jobs, line), u)],
      },
    }, [[0, end], [null, null]]);
    const over = place.chart.over;
    over.addEventListener("mouseleave", () => tell(null));
    over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey && !place.zoom) return; // the page scrolls; once zoomed, or with Ctrl, the wheel zooms
      event.preventDefault();
      const box = over.getBoundingClientRect();
      zoom(place, event.deltaY < 0 ? 0.75 : 1 / 0.75, event.clientX - box.left, event.clientY - box.top);
    }, { passive: false });
  }

  // By client, for the cursor, and by age, for the pen: the stalest are drawn last, on top.
  function prepared(line) {
    const { client, version, step, start_times, end_times } = line.jobs, count = client.length;
    const classes = ages(line), sorted = classes.map(() => []), rows = new Map();
    let end = 0;
    for (let j = 0; j < count; j += 1) {
      sorted[aged(step[j] - version[j], classes)].push(j);
      if (!rows.has(client[j])) rows.set(client[j], []);
      rows.get(client[j]).push(j);
      if (end_times[j] > end) end = end_times[j];
    }
    return { client, version, step, start_times, end_times, sorted, rows, end };
  }

  function segments(u, jobs, line, place) {
    const begun = performance.now(), pen = u.ctx, { left, top, width, height } = u.bbox;
    const x = range(u, "x"), y = range(u, "y"), kx = width / (x.max - x.min), ky = height / (y.max - y.min);
    const thick = Math.max(1, Math.min(9 * devicePixelRatio, 0.72 * ky));
    pen.save();
    pen.beginPath(); pen.rect(left, top, width, height); pen.clip();
    place.online = reachable(pen, line.online, { x, y, left, top, height, kx, ky });
    lines(pen, line.steps.filter((t) => t >= x.min && t <= x.max).map((t) => left + (t - x.min) * kx), top, height, width);
    let drawn = 0;
    jobs.sorted.forEach((those, k) => {
      pen.beginPath();
      for (const j of those) {
        if (jobs.end_times[j] < x.min || jobs.start_times[j] > x.max || jobs.client[j] < y.min - 1 || jobs.client[j] > y.max + 1) continue;
        const a = left + (jobs.start_times[j] - x.min) * kx, b = left + (jobs.end_times[j] - x.min) * kx, at = top + height - (jobs.client[j] - y.min) * ky;
        pen.rect(a, at - thick / 2, Math.max(b - a, 1), thick);
        drawn += 1;
      }
      pen.fillStyle = paint(`a${k}`);
      pen.fill();
    });
    pen.restore();
    place.drawn = drawn;
    place.took = performance.now() - begun;
  }

  // Who can be reached, behind what they do; how many spans are drawn.
  function reachable(pen, online, { x, y, left, top, height, kx, ky }) {
    if (!online) return 0;
    let drawn = 0;
    pen.beginPath();
    online.client.forEach((client, i) => {
      const from = online.from[i], to = online.to[i];
      if (to < x.min || from > x.max || client < y.min - 1 || client > y.max + 1) return;
      pen.rect(left + (from - x.min) * kx, top + height - (client - y.min + 0.5) * ky, Math.max((to - from) * kx, 1), Math.max(ky, 1));
      drawn += 1;
    });
    pen.fillStyle = faded(paint("ink"), 0.1);
    pen.fill();
    return drawn;
  }

  // When the server stepped: a line each, fainter where they are many.
  function lines(pen, at, top, height, width) {
    if (at.length > width / 3) return;
    pen.strokeStyle = faded(paint("ink"), Math.min(0.22, 20 / (at.length + 1)));
    pen.lineWidth = devicePixelRatio;
    pen.beginPath();
    for (const x of at) { pen.moveTo(x, top); pen.lineTo(x, top + height); }
    pen.stroke();
  }

  function near(u, jobs, line) {
    const time = u.posToVal(u.cursor.left, "x"), client = Math.round(u.posToVal(u.cursor.top, "y"));
    const reach = Math.ceil(Math.abs(u.posToVal(0, "y") - u.posToVal(4, "y"))); // rows within four pixels
    const slack = Math.abs(u.posToVal(3, "x") - u.posToVal(0, "x"));
    for (let away = 0; away <= reach; away += 1)
      for (const c of away ? [client - away, client + away] : [client])
        for (const j of jobs.rows.get(c) || [])
          if (jobs.start_times[j] - slack <= time && time <= jobs.end_times[j] + slack) return { time, client: c, version: jobs.version[j], step: jobs.step[j], start_times: jobs.start_times[j], end_times: jobs.end_times[j] };
    return { time, client, version: null, step: line.steps.findLastIndex((t) => t <= time) + 1 };
  }

  return { curves, timeline, zoom, all, paint, dashes, colour, ages };
})();
