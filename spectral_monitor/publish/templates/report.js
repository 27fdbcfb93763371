"use strict";
// The report's charts. Reads the JSON of #data; draws SVG for lines and canvas for maps. No library, no request.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const O = data.steps.length, K = data.heads.length;
  const names = data.heads.map(([layer, head]) => `L${layer}H${head}`);
  const column = new Map(names.map((name, k) => [name, k]));

  // -- values ---------------------------------------------------------------------------------------------------
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  function packed(entry) {
    // 16-bit codes: 65535 is missing; others run evenly (in the logarithm if entry.log) from lo to hi
    const codes = new Uint16Array(bytes(entry.data).buffer);
    const { lo, hi, log } = entry;
    return (o, k) => {
      const code = codes[o * K + k];
      if (code === 65535) return NaN;
      const t = code / 65534;
      return log ? lo * Math.pow(hi / lo, t) : lo + t * (hi - lo);
    };
  }
  const pr = packed(data.pr);
  const selectivity = Object.fromEntries(Object.entries(data.selectivity).map(([n, e]) => [n, packed(e)]));
  const attention = Object.fromEntries(Object.entries(data.attention).map(([n, e]) => [n, packed(e)]));
  const classCodes = bytes(data.class.data);
  const classOf = (o, k) => data.class.names[classCodes[o * K + k]];
  const cap = data.capability;
  function member(o, k, name = cap) {
    if (!selectivity[name] || !data.used[o]) return false;
    const bar = name === "previous_token" ? data.bars.previous_token : data.bars.member;
    if (!(selectivity[name](o, k) >= bar * 0.9995)) return false;
    if (attention[name] && attention[name](o, k) < data.bars.min_attention) return false;
    return name !== "previous_token" || classOf(o, k) === name;
  }

  // -- words ----------------------------------------------------------------------------------------------------
  function number(v, digits = 3) {
    if (v === null || Number.isNaN(v)) return "–";
    if (!Number.isFinite(v)) return "∞";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e6 || size < 1e-4) return v.toExponential(digits - 1);
    return v.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
  }
  // without zeros behind the point that say nothing
  const plain = (v, digits = 3) => { const text = number(v, digits); return /\.\d*0$/.test(text) ? text.replace(/\.?0+$/, "") : text; };
  function tokens(v) {
    for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
      if (Math.abs(v) >= size * 0.9995) return plain(v / size) + letter;
    return String(Math.round(v));
  }
  const onTokens = data.axis === "tokens";
  const short = (x) => (onTokens ? tokens(x) : String(Math.round(x)));
  const time = (x) => (onTokens ? `${tokens(x)} tokens` : `step ${Math.round(x)}`);
  const words = (name) => name.replace(/_/g, "-");
  const stamp = (o) => `step ${data.steps[o]}` + (onTokens ? ` · ${time(data.x[o])}` : "");

  // -- look -----------------------------------------------------------------------------------------------------
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const dark = () => root.dataset.theme === "dark";
  const classColour = (name) => css(name) || css("self");
  // sequential maps, monotone in lightness so that they survive grey print and colour blindness
  const RAMPS = {
    light: { pr: ["#f4f1ea", "#bcd2dc", "#6fa6c4", "#2b6f9e", "#0b3556"], screen: ["#f4f1ea", "#f3cfa6", "#e6934e", "#b9531a", "#5c210b"] },
    dark: { pr: ["#20262b", "#23465e", "#2f79a8", "#76b9e3", "#e3f4ff"], screen: ["#20262b", "#5a3420", "#a5591f", "#ee9b46", "#fff0d2"] },
  };
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  function colour(which, t) {
    const stops = RAMPS[dark() ? "dark" : "light"][which];
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
    const a = rgb(stops[i]), b = rgb(stops[i + 1]);
    return `rgb(${a.map((v, j) => Math.round(v + (b[j] - v) * (at - i))).join(",")})`;
  }
  // lines: Okabe-Ito order, each with its own dash as a second cue
  const LINES = ["induction", "first_token", "previous_token", "self", "duplicate_token", "local"];
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "1 2"];
  const style = (i) => ({ stroke: css(LINES[i % 6]), dash: DASHES[(i + Math.floor(i / 6)) % 6] });

  // -- small SVG kit --------------------------------------------------------------------------------------------
  const NS = "http://www.w3.org/2000/svg";
  function el(name, attributes = {}, parent = null, text = null) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }
  const tip = document.getElementById("tip");
  function showTip(text, x, y) {
    tip.textContent = text; tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  const positive = data.x.filter((x) => x > 0);
  const zero = data.x.some((x) => x <= 0);
  const lo = Math.min(...positive), hi = Math.max(...positive);
  const canLog = positive.length > 1 && hi / lo > 12;
  // logarithmic, unless what happens would be squeezed against the right edge and a plain axis shows it
  const crossings = data.leads.map((l) => l.crossing).filter((x) => x !== null && x > 0).sort((a, b) => a - b);
  const middle = crossings[Math.floor(crossings.length / 2)];
  const squeezed = middle !== undefined && Math.log(middle / lo) / Math.log(hi / lo) > .85 && middle / hi < .85 && middle / hi > .1;
  let useLog = canLog && !squeezed;
  function timeScale(left, right) {
    const log = useLog;
    const from = zero && log ? left + 26 : left;
    const a = log ? Math.log(lo) : (zero ? 0 : lo), b = log ? Math.log(hi) : hi;
    const place = (x) => {
      if (log && x <= 0) return left;
      if (b === a) return (from + right) / 2;
      return from + (right - from) * ((log ? Math.log(x) : x) - a) / (b - a);
    };
    let ticks = [];
    if (!positive.length) ticks = [0];
    else if (log) {
      const decades = Math.log10(hi / lo), steps = decades > 2.2 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
      for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++)
        for (const m of steps) { const v = m * Math.pow(10, e); if (v >= lo * 0.999 && v <= hi * 1.001) ticks.push(v); }
      if (zero) ticks.unshift(0);
    } else {
      const raw = (b - a) / 6 || 1, mag = Math.pow(10, Math.floor(Math.log10(raw)));
      const step = [1, 2, 5, 10].map((m) => m * mag).find((s) => s >= raw);
      for (let v = Math.ceil(a / step) * step; v <= b * 1.0001; v += step) ticks.push(v);
    }
    const kept = []; let last = -1e9;
    for (const v of ticks) if (place(v) - last > 46) { kept.push(v); last = place(v); }
    return { place, ticks: kept };
  }
  function valueScale(lo, hi, bottom, top, log) {
    const a = log ? Math.log(lo) : lo, b = log ? Math.log(hi) : hi;
    const place = (v) => bottom + (top - bottom) * ((log ? Math.log(Math.max(v, lo)) : v) - a) / (b - a || 1);
    const ticks = [];
    if (log) {
      const steps = Math.log10(hi / lo) > 2 ? [1] : [1, 2, 5];
      for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++)
        for (const m of steps) { const v = m * Math.pow(10, e); if (v >= lo * 0.99 && v <= hi * 1.01) ticks.push(v); }
    } else {
      const raw = (hi - lo) / 4 || 1, mag = Math.pow(10, Math.floor(Math.log10(raw)));
      const step = [1, 2, 2.5, 5, 10].map((m) => m * mag).find((s) => s >= raw * 0.999);
      for (let v = Math.ceil(lo / step) * step; v <= hi + step * 0.001; v += step) ticks.push(v);
    }
    return { place, ticks };
  }
  // a page of paper is laid out for its own width, not for the window's
  let printing = false;
  const room = (host, least) => (printing ? (host.closest(".pair") ? 326 : host.closest(".verdict") ? 640 : 680) : Math.max(least, host.clientWidth || 600));
  function frame(id, height, { left = 52, right = 14, top = 10, label }) {
    const host = document.getElementById(id);
    host.textContent = "";
    const width = room(host, 280);
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, host);
    const bottom = height - 26;
    return { host, svg, width, left, right: width - right, top, bottom, x: timeScale(left, width - right) };
  }
  function xAxis(f, lines = true) {
    for (const v of f.x.ticks) {
      const x = f.x.place(v);
      if (lines) el("line", { x1: x, x2: x, y1: f.top, y2: f.bottom, stroke: css("grid") }, f.svg);
      el("text", { x, y: f.bottom + 17, "text-anchor": "middle", fill: css("soft") }, f.svg, short(v));
    }
    el("line", { x1: f.left, x2: f.right, y1: f.bottom, y2: f.bottom, stroke: css("faint") }, f.svg);
  }
  function yAxis(f, scale, show) {
    for (const v of scale.ticks) {
      const y = scale.place(v);
      el("line", { x1: f.left, x2: f.right, y1: y, y2: y, stroke: css("grid") }, f.svg);
      el("text", { x: f.left - 8, y: y + 4, "text-anchor": "end", fill: css("soft") }, f.svg, show(v));
    }
  }
  let cursors = [];
  function cursor(f) {
    const line = el("line", { y1: f.top, y2: f.bottom, stroke: css("ink"), "stroke-opacity": .35, "stroke-dasharray": "2 2", class: "cursor" }, f.svg);
    const set = () => { const x = f.x.place(data.x[state.at]); line.setAttribute("x1", x); line.setAttribute("x2", x); };
    cursors = cursors.filter((c) => c.line.isConnected);
    cursors.push({ line, set }); set();
  }
  function path(points) {
    let d = "", pen = false;
    for (const p of points) { if (p === null) { pen = false; continue; } d += `${pen ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`; pen = true; }
    return d;
  }
  // lines: [{name, values [O], stroke, dash, width, marks: [{o, glyph, text}]}]
  function lineChart(id, height, lines, options) {
    const wide = Math.max(...lines.map((l) => l.name.length), 0) * 6.6 + 20;
    const f = frame(id, height, { right: options.direct === false ? 14 : Math.min(130, wide), label: options.label, top: 12 });
    const all = lines.flatMap((l) => l.values.filter((v) => v !== null && Number.isFinite(v)));
    if (!all.length) { f.host.textContent = options.empty || "Not recorded."; return f; }
    let lo = options.lo ?? Math.min(...all), hi = options.hi ?? Math.max(...all, ...(options.bars || []).map((b) => b.value));
    if (hi <= lo) hi = lo + (options.log ? lo : 1);
    const y = valueScale(lo, hi, f.bottom, f.top, options.log);
    yAxis(f, y, options.show || ((v) => plain(v, 2)));
    xAxis(f, false);
    for (const s of options.shades || []) {
      const x1 = f.x.place(s[0]), x2 = f.x.place(s[1]);
      el("rect", { x: x1, y: f.top, width: Math.max(2, x2 - x1), height: f.bottom - f.top, fill: css("shade") }, f.svg);
    }
    const notes = [];
    for (const b of options.bars || []) {
      if (!(b.value >= lo && b.value <= hi)) continue;
      const at = y.place(b.value);
      el("line", { x1: f.left, x2: f.right, y1: at, y2: at, stroke: css("soft"), "stroke-dasharray": "5 4" }, f.svg);
      notes.push(() => el("text", { x: f.left + 4, y: at - 5, fill: css("soft"), stroke: css("paper"), "stroke-width": 4, "paint-order": "stroke", "stroke-linejoin": "round" }, f.svg, b.name));
    }
    cursor(f);
    const ends = [];
    for (const l of lines) {
      const points = l.values.map((v, o) => (v === null || !Number.isFinite(v) || !data.used[o] ? null : [f.x.place(data.x[o]), y.place(v)]));
      const joined = points.filter((p) => p !== null);
      el("path", { d: path(joined), fill: "none", stroke: l.stroke, "stroke-width": l.width || 1.8, "stroke-dasharray": l.dash || null, "stroke-linejoin": "round", "stroke-opacity": l.opacity ?? 1 }, f.svg);
      if (O <= 60) for (const p of joined) el("circle", { cx: p[0], cy: p[1], r: 1.9, fill: l.stroke, "fill-opacity": l.opacity ?? 1 }, f.svg);
      for (const m of l.marks || []) if (points[m.o]) glyph(f.svg, m.glyph, points[m.o], l.stroke, m.text);
      if (joined.length && options.direct !== false) ends.push({ y: joined.at(-1)[1], x: joined.at(-1)[0], name: l.name, stroke: l.stroke });
    }
    notes.forEach((write) => write());
    ends.sort((a, b) => a.y - b.y);
    for (let i = 1; i < ends.length; i++) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 13);
    const over = ends.length ? ends.at(-1).y - f.bottom : 0;
    if (over > 0) for (let i = ends.length - 1, floor = f.bottom; i >= 0; i--) { ends[i].y = Math.min(ends[i].y, floor); floor = ends[i].y - 13; }
    for (const e of ends) el("text", { x: f.right + 7, y: e.y + 4, fill: e.stroke }, f.svg, e.name);
    hoverLines(f, lines, options.value || ((v) => number(v)));
    return f;
  }
  function glyph(svg, kind, [x, y], stroke, text) {
    const look = { stroke, fill: css("paper"), "stroke-width": 1.8, class: "mark", "data-tip": text };
    const node = kind === "alarm" ? el("path", { d: `M${x} ${y - 7}L${x + 6} ${y + 4}L${x - 6} ${y + 4}Z`, ...look }, svg)
      : kind === "crossing" ? el("circle", { cx: x, cy: y, r: 5, ...look, fill: stroke }, svg)
      : el("circle", { cx: x, cy: y, r: 5, ...look }, svg);
    el("title", {}, node, text);
  }
  function nearest(f, px) {
    let best = 0;
    for (let o = 1; o < O; o++) if (Math.abs(f.x.place(data.x[o]) - px) < Math.abs(f.x.place(data.x[best]) - px)) best = o;
    return best;
  }
  function hoverLines(f, lines, value) {
    f.svg.addEventListener("pointermove", (event) => {
      const mark = event.target.closest ? event.target.closest(".mark") : null;
      if (mark) return showTip(mark.dataset.tip, event.clientX, event.clientY);
      const box = f.svg.getBoundingClientRect(), o = nearest(f, (event.clientX - box.left) * f.width / box.width);
      const rows = lines.slice(0, 14).map((l) => `${l.name}: ${l.values[o] === null || Number.isNaN(l.values[o]) ? "–" : value(l.values[o])}`);
      showTip([stamp(o) + (data.used[o] ? "" : ` (${data.marks[o]})`), ...rows].join("\n"), event.clientX, event.clientY);
    });
    f.svg.addEventListener("pointerleave", hideTip);
    f.svg.addEventListener("click", (event) => {
      const box = f.svg.getBoundingClientRect();
      set(nearest(f, (event.clientX - box.left) * f.width / box.width));
    });
  }

  // -- maps -----------------------------------------------------------------------------------------------------
  // A grid of cells on a canvas; paint(row, col) -> {fill, ring, text} or null; pick is called with (row, col).
  function grid(id, rows, cols, options) {
    const host = document.getElementById(id);
    host.textContent = "";
    const left = 44, right = 16, top = 4, bottom = 20, width = room(host, 240);
    const cw = Math.min(options.maxCell || 34, (width - left - right) / cols);
    const ch = Math.max(options.minRow || 9, Math.min(30, options.height ? options.height / rows : cw, 420 / rows));
    const ratio = Math.max(2, devicePixelRatio || 1), W = Math.ceil(left + cw * cols + right), H = Math.ceil(top + ch * rows + bottom);
    const canvas = document.createElement("canvas");
    canvas.width = W * ratio; canvas.height = H * ratio; canvas.style.width = `${W}px`; canvas.style.height = `${H}px`;
    canvas.tabIndex = 0; canvas.setAttribute("role", "application"); canvas.setAttribute("aria-label", options.label);
    host.append(canvas);
    const c = canvas.getContext("2d");
    let here = null;
    function draw() {
      c.setTransform(ratio, 0, 0, ratio, 0, 0); c.clearRect(0, 0, W, H);
      const gap = cw > 5 && ch > 5 ? 1 : 0, rings = [];
      for (let r = 0; r < rows; r++) for (let k = 0; k < cols; k++) {
        const cell = options.paint(r, k);
        if (!cell) continue;
        const x = left + k * cw, y = top + r * ch;
        if (cell.fill) { c.fillStyle = cell.fill; c.fillRect(x, y, cw - gap, ch - gap); }
        else { c.strokeStyle = css("faint"); c.lineWidth = .8; c.beginPath(); c.moveTo(x + 1, y + ch - 2); c.lineTo(x + cw - 2, y + 1); c.stroke(); }
        if (cell.ring) rings.push([x, y, cell.ring]);
      }
      for (const [x, y, ring] of rings) {
        c.lineWidth = 3.5; c.strokeStyle = css("paper"); c.strokeRect(x, y, cw - gap, ch - gap);
        c.lineWidth = ring === "followed" ? 1.2 : 2; c.setLineDash(ring === "followed" ? [2, 2] : []); c.strokeStyle = css("ink");
        c.strokeRect(x, y, cw - gap, ch - gap); c.setLineDash([]);
      }
      if (here) { c.lineWidth = 2; c.strokeStyle = css("accent"); c.strokeRect(left + here[1] * cw - 1, top + here[0] * ch - 1, cw + 1, ch + 1); }
      c.fillStyle = css("soft"); c.font = `11px ${css("sans")}`; c.textBaseline = "middle"; c.textAlign = "right";
      const every = Math.max(1, Math.ceil(13 / ch));
      for (let r = 0; r < rows; r += every) c.fillText(options.row(r), left - 7, top + (r + .5) * ch);
      c.textAlign = "center"; c.textBaseline = "top";
      for (const [k, text] of options.columns(cw)) c.fillText(text, left + (k + .5) * cw, top + rows * ch + 4);
    }
    const find = (event) => {
      const box = canvas.getBoundingClientRect();
      const k = Math.floor((event.clientX - box.left - left) / cw), r = Math.floor((event.clientY - box.top - top) / ch);
      return r >= 0 && r < rows && k >= 0 && k < cols ? [r, k] : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const cell = find(event), text = cell && options.tip(...cell);
      text ? showTip(text, event.clientX, event.clientY) : hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("click", (event) => { const cell = find(event); if (cell) options.pick(...cell); });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (move) {
        here = here ? [Math.min(rows - 1, Math.max(0, here[0] + move[0])), Math.min(cols - 1, Math.max(0, here[1] + move[1]))] : [0, 0];
        draw();
        const box = canvas.getBoundingClientRect(), text = options.tip(...here);
        text ? showTip(text, box.left + left + (here[1] + .5) * cw, box.top + top + here[0] * ch) : hideTip();
        event.preventDefault();
      } else if ((event.key === "Enter" || event.key === " ") && here) { options.pick(...here); event.preventDefault(); }
      else if (event.key === "Escape") { here = null; hideTip(); draw(); }
    });
    canvas.addEventListener("blur", () => { here = null; hideTip(); draw(); });
    draw();
    return { host, draw };
  }
  function legend(host, parts) {
    const box = document.createElement("div");
    box.className = "legend";
    for (const part of parts) {
      if (typeof part === "string") {
        const word = document.createElement("span");
        word.textContent = part;
        box.append(word);
      } else {
        const mark = document.createElement(part.ramp ? "span" : "i");
        if (part.ramp) { mark.className = "ramp"; mark.style.background = `linear-gradient(90deg, ${[0, .25, .5, .75, 1].map((t) => colour(part.ramp, t)).join(",")})`; }
        else mark.style.background = part.fill;
        box.append(mark);
        if (part.text) { const word = document.createElement("span"); word.textContent = part.text; box.append(word); }
      }
    }
    host.append(box);
  }

  const layerRow = new Map(data.layers.map((layer, r) => [layer, r]));
  const columnsOf = Math.max(...data.heads.map(([, head]) => head)) + 1;
  const cellOf = new Map(data.heads.map(([layer, head], k) => [layerRow.get(layer) * columnsOf + head, k]));
  const headColumns = (cw) => {
    const every = Math.max(1, Math.ceil(26 / cw)), result = [];
    for (let k = 0; k < columnsOf; k += every) result.push([k, `H${k}`]);
    return result;
  };
  const state = { at: data.start, metric: null, followed: data.followed.slice(), timer: null };
  const metrics = [];
  for (const name of Object.keys(selectivity)) metrics.push({ id: `selectivity ${name}`, text: `${words(name)} selectivity`, kind: "selectivity", name });
  for (const name of Object.keys(attention)) metrics.push({ id: `attention ${name}`, text: `${words(name)} attention mass`, kind: "attention", name });
  if (data.class.names.some((name) => name && name !== "none")) metrics.push({ id: "class", text: "class of the head", kind: "class" });
  state.metric = metrics.find((m) => m.name === cap && m.kind === "selectivity") || metrics[0] || null;

  function largest(entry) { return Math.max(entry.hi, entry.lo * 1.01); }
  function headTip(k) {
    const o = state.at, lines = [`${names[k]} at ${stamp(o)}`, `PR ${number(pr(o, k))}`];
    for (const name of Object.keys(selectivity)) {
      const a = attention[name] ? `, attention ${number(attention[name](o, k), 2)}` : "";
      if (name === cap || (state.metric && state.metric.name === name)) lines.push(`${words(name)} ${number(selectivity[name](o, k))}x${a}`);
    }
    const kind = classOf(o, k);
    if (kind) lines.push(`class ${words(kind)}`);
    return lines.join("\n");
  }
  const ring = (k) => (member(state.at, k) ? "member" : state.followed.includes(names[k]) ? "followed" : null);
  const maps = [];
  function drawMaps() {
    maps.length = 0;
    const common = {
      row: (r) => `L${data.layers[r]}`, columns: headColumns, height: data.layers.length > 14 ? 430 : null,
      tip: (r, h) => { const k = cellOf.get(r * columnsOf + h); return k === undefined ? null : headTip(k); },
      pick: (r, h) => { const k = cellOf.get(r * columnsOf + h); if (k !== undefined) follow(names[k]); },
    };
    const prTop = Math.log(largest(data.pr));
    const left = grid("m-pr", data.layers.length, columnsOf, {
      ...common, label: "PR of every head; arrow keys move, Enter follows a head",
      paint: (r, h) => {
        const k = cellOf.get(r * columnsOf + h);
        if (k === undefined) return null;
        const v = pr(state.at, k);
        return { fill: Number.isNaN(v) ? null : colour("pr", Math.log(Math.max(v, 1)) / prTop), ring: ring(k) };
      },
    });
    legend(left.host, ["1", { ramp: "pr" }, number(Math.exp(prTop), 2)]);
    maps.push(left);
    const m = state.metric;
    if (!m) { document.getElementById("m-screen").textContent = "The record holds no attention or selectivity."; return; }
    const top = m.kind === "selectivity" ? Math.log(Math.max(2, largest(data.selectivity[m.name]))) : 1;
    const right = grid("m-screen", data.layers.length, columnsOf, {
      ...common, label: `${m.text} of every head; arrow keys move, Enter follows a head`,
      paint: (r, h) => {
        const k = cellOf.get(r * columnsOf + h);
        if (k === undefined) return null;
        if (m.kind === "class") { const kind = classOf(state.at, k); return { fill: kind ? (kind === "none" ? colour("screen", 0) : classColour(kind)) : null, ring: ring(k) }; }
        const v = m.kind === "selectivity" ? selectivity[m.name](state.at, k) : attention[m.name](state.at, k);
        const t = m.kind === "selectivity" ? Math.log(Math.max(v, 1)) / top : Math.sqrt(v);
        return { fill: Number.isNaN(v) ? null : colour("screen", t), ring: ring(k) };
      },
    });
    if (m.kind === "class") legend(right.host, data.class.names.filter((n) => n).map((n) => ({ fill: n === "none" ? colour("screen", 0) : classColour(n), text: words(n) })));
    else if (m.kind === "selectivity") legend(right.host, ["1x or less", { ramp: "screen" }, `${number(Math.exp(top), 2)}x`, data.baseline ? `(baseline: ${data.baseline})` : ""]);
    else legend(right.host, ["0", { ramp: "screen" }, "1 (square-root scale)"]);
    maps.push(right);
  }

  // -- followed heads -------------------------------------------------------------------------------------------
  function follow(name) {
    const at = state.followed.indexOf(name);
    if (at >= 0) state.followed.splice(at, 1); else state.followed.push(name);
    if (state.followed.length > 12) state.followed.shift();
    drawFollowed(); maps.forEach((m) => m.draw());
  }
  function drawFollowed() {
    const chips = document.getElementById("chips");
    chips.textContent = "";
    state.followed.forEach((name, i) => {
      const chip = document.createElement("button");
      chip.type = "button"; chip.className = "chip"; chip.title = `Stop following ${name}`;
      const line = el("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
      el("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: style(i).stroke, "stroke-width": 2.4, "stroke-dasharray": style(i).dash || null }, line);
      chip.append(line, `${name} ×`);
      chip.addEventListener("click", () => follow(name));
      chips.append(chip);
    });
    const all = [...Array(O).keys()];
    const at = (x) => data.x.findIndex((v) => v === x);
    const alarms = (name) => data.events.filter((e) => e.heads.includes(name) && /_rise$/.test(e.kind))
      .map((e) => ({ o: data.steps.indexOf(e.step), glyph: "alarm", text: `${name} alarm: ${e.kind.replace("_", " ")}\n${e.text || ""}` })).filter((m) => m.o >= 0);
    const lead = (name) => data.leads.find((l) => l.head === name);
    const rise = (name) => { const l = lead(name); return l && l.rise !== null ? [{ o: at(l.rise), glyph: "rise", text: `${name}: PR rise by ${time(l.rise)}` }] : []; };
    const cross = (name) => { const l = lead(name); return l && l.crossing !== null ? [{ o: at(l.crossing), glyph: "crossing", text: `${name}: crossed ${data.bars.member}x by ${time(l.crossing)}` }] : []; };
    const lines = (value, marks) => state.followed.filter((n) => column.has(n)).map((name, i) => ({
      name, values: all.map((o) => value(o, column.get(name))), ...style(i), marks: marks(name),
    }));
    const none = "Click a head in a map to follow it.";
    lineChart("c-pr", 230, lines(pr, (n) => [...rise(n), ...alarms(n)]), { log: true, lo: 1, label: "PR of the followed heads over training", empty: none });
    document.getElementById("sel-title").innerHTML = "";
    document.getElementById("sel-title").append(`${words(cap)[0].toUpperCase()}${words(cap).slice(1)} selectivity `);
    const hint = document.createElement("span");
    hint.textContent = "● crossing of the circuit’s bar";
    document.getElementById("sel-title").append(hint);
    if (!selectivity[cap]) { document.getElementById("c-selectivity").textContent = "The record holds no selectivity for this capability."; return; }
    const bars = [{ value: data.bars.member, name: `member, ${data.bars.member}x` }];
    const floor = data.null_p99[state.at];
    if (floor !== null && floor > 1) bars.push({ value: floor, name: `noise floor, ${number(floor, 2)}x` });
    lineChart("c-selectivity", 250, lines(selectivity[cap], cross), { log: true, lo: 0.1, bars, label: "Selectivity of the followed heads over training", empty: none, value: (v) => `${number(v)}x`, show: (v) => `${v < 1 ? v : Math.round(v)}x` });
  }

  // -- the other charts -----------------------------------------------------------------------------------------
  const label = (name) => {
    if (name.startsWith("circuit")) return name;
    const m = /^(.+?)_(heads|fraction)>=(.+)$/.exec(name);
    if (!m) return name;
    return m[2] === "heads" ? `${m[3]} ${words(m[1])} heads` : `${Math.round(100 * m[3])}% first-token`;
  };
  function intervalRows(id, rows, aria, left) {
    // rows: [{name, spans: [{after, by, fill, text}], missing}]
    const f = frame(id, rows.length * 25 + 40, { left, right: 14, top: 6, label: aria });
    xAxis(f);
    cursor(f);
    rows.forEach((row, i) => {
      const y = f.top + 6 + i * 25 + 7;
      el("text", { x: f.left - 12, y: y + 4, "text-anchor": "end", fill: row.missing ? css("faint") : css("ink") }, f.svg, row.name);
      if (row.missing) {
        el("line", { x1: f.left, x2: f.right, y1: y, y2: y, stroke: css("rule"), "stroke-dasharray": "1 4" }, f.svg);
        el("text", { x: f.right, y: y - 3, "text-anchor": "end", fill: css("faint") }, f.svg, row.missing);
      }
      row.spans.forEach((s, j) => {
        const x2 = f.x.place(s.by), x1 = s.after === null ? f.left : f.x.place(s.after);
        const dy = row.spans.length > 1 ? (j ? 4 : -4) : 0, h = row.spans.length > 1 ? 7 : 11;
        const bar = el("rect", { x: x1, y: y - h / 2 + dy, width: Math.max(3, x2 - x1), height: h, rx: 2, fill: s.fill, "fill-opacity": s.after === null ? .35 : .85, class: "mark", "data-tip": s.text }, f.svg);
        if (s.hollow) { bar.setAttribute("fill", css("paper")); bar.setAttribute("stroke", s.fill); bar.setAttribute("stroke-width", 1.6); bar.setAttribute("fill-opacity", 1); }
        el("title", {}, bar, s.text);
      });
    });
    f.svg.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(".mark");
      mark ? showTip(mark.dataset.tip, event.clientX, event.clientY) : hideTip();
    });
    f.svg.addEventListener("pointerleave", hideTip);
  }
  const between = (a, b) => (a === null ? `at or before ${time(b)}` : `between ${short(a)} and ${time(b)}`);
  function drawWhen() {
    const seen = data.milestones.filter((m) => m.by !== null);
    const host = document.getElementById("c-milestones");
    if (seen.length) intervalRows("c-milestones", seen.map((m) => ({
      name: label(m.name), missing: null,
      spans: [{ after: m.after, by: m.by, fill: classColour(m.class), text: `${label(m.name)}\n${between(m.after, m.by)}` }],
    })), "Milestones over training", 176);
    else host.textContent = "";
    for (const [status, start] of [["not seen", `Not seen up to ${time(data.x.at(-1))}`], ["not measured", "Not measured, the record lacks the columns"]]) {
      const absent = data.milestones.filter((m) => m.by === null && m.status === status && m.possible);
      if (!absent.length) continue;
      const line = document.createElement("p");
      line.className = "note";
      line.textContent = `${start}: ${absent.map((m) => label(m.name)).join(", ")}.`;
      host.append(line);
    }
    const order = Object.keys(data.fractions).filter((n) => n !== "none").map((name) => ({ name: words(name), values: data.fractions[name], stroke: classColour(name), dash: DASHES[Math.max(0, LINES.indexOf(name))] }));
    lineChart("c-classes", 230, order, { lo: 0, label: "Share of heads in each class over training", show: (v) => `${Math.round(v * 100)}%`, value: (v) => `${(100 * v).toFixed(1)}%`, empty: "The record holds no classes." });
    lineChart("c-probe", 230, [{ name: "top-1", values: data.top1, stroke: css("ink") }], { lo: 0, hi: 1, direct: false, label: "Probe accuracy over training", show: (v) => `${Math.round(v * 100)}%`, value: (v) => `${(100 * v).toFixed(1)}%`, empty: "The record holds no probe accuracy." });
  }
  function drawSinks() {
    const share = data.first_token_fraction;
    document.getElementById("p-sinks").hidden = !share.some((v) => v > 0);
    if (!share.some((v) => v > 0)) return;
    const shades = data.shape.after !== null ? [[data.shape.after, data.shape.by]] : [];
    lineChart("c-sink", 230, [{ name: "first-token", values: share, stroke: classColour("first_token") }], { lo: 0, hi: 1, shades, direct: false, label: "Share of first-token heads over training", show: (v) => `${Math.round(v * 100)}%`, value: (v) => `${(100 * v).toFixed(1)}%`, empty: "The record holds no classes." });
    if (!data.first_token_by_layer) { document.getElementById("m-sink").textContent = "The record holds no classes."; return; }
    const map = grid("m-sink", data.layers.length, O, {
      label: "First-token heads by layer and observation", maxCell: 40, minRow: 7, height: 204,
      row: (r) => `L${data.layers[r]}`,
      columns: (cw) => { const every = Math.max(1, Math.ceil(48 / cw)), result = []; for (let o = 0; o < O; o += every) result.push([o, short(data.x[o])]); return result; },
      paint: (r, o) => ({ fill: data.used[o] ? colour("pr", data.first_token_by_layer[o][r] / data.heads_by_layer[r]) : null, ring: null }),
      tip: (r, o) => `layer ${data.layers[r]} at ${stamp(o)}\n${data.first_token_by_layer[o][r]} of ${data.heads_by_layer[r]} heads`,
      pick: (r, o) => set(o),
    });
    legend(map.host, ["0%", { ramp: "pr" }, "100%"]);
  }
  function drawVerdicts() {
    const host = document.getElementById("c-verdicts");
    host.textContent = "";
    data.verdicts.forEach((v) => {
      const card = document.createElement("div");
      card.className = "verdict";
      card.innerHTML = "<h3></h3><p></p><div class='chart'></div>";
      card.querySelector("h3").textContent = `${words(v.capability)[0].toUpperCase()}${words(v.capability).slice(1)}, ${v.mode} ablation: ${v.verdict}`;
      card.querySelector("p").textContent = `${v.heads.join(" ")} at step ${v.step}. ${v.reason.slice(0, 1).toUpperCase()}${v.reason.slice(1)}`;
      host.append(card);
      const chart = card.querySelector(".chart");
      chart.id = `v-${v.id}`;
      strip(chart.id, v);
    });
  }
  function strip(id, v) {
    // damage in nats of log-probability, one dot a matched-random draw
    const values = [0, v.circuit, v.bound, ...v.random].filter((x) => x !== null);
    if (values.length < 2) { document.getElementById(id).remove(); return; }
    const host = document.getElementById(id), width = room(host, 280), left = 14, right = width - 24;
    let lo = Math.min(...values), hi = Math.max(...values, v.ci[1] ?? -Infinity);
    const pad = (hi - lo) * .05 || .1; lo -= pad; hi += pad;
    const x = (value) => left + (right - left) * (value - lo) / (hi - lo);
    const bins = new Map(), dots = [];
    for (const value of v.random.slice().sort((a, b) => a - b)) {
      const bin = Math.round(x(value) / 7), level = bins.get(bin) || 0;
      bins.set(bin, level + 1); dots.push([bin * 7, level, value]);
    }
    const stack = Math.min(9, Math.max(1, ...bins.values())), scale = Math.max(...bins.values(), 1) > 9 ? 9 / Math.max(...bins.values()) : 1;
    const height = 76 + stack * 8, base = height - 42;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Damage by ablation: circuit ${number(v.circuit)} nats, matched random ${v.random.length} draws` }, host);
    const s = valueScale(lo, hi, left, right, false);
    for (const t of s.ticks) {
      el("line", { x1: x(t), x2: x(t), y1: 22, y2: base, stroke: css("grid") }, svg);
      el("text", { x: x(t), y: base + 16, "text-anchor": "middle", fill: css("soft") }, svg, plain(t, 2).replace(/^-/, "\u2212"));
    }
    el("line", { x1: left, x2: right, y1: base, y2: base, stroke: css("faint") }, svg);
    el("text", { x: right, y: height - 1, "text-anchor": "end", fill: css("soft") }, svg, "nats of log-probability lost");
    el("line", { x1: x(0), x2: x(0), y1: 22, y2: base, stroke: css("ink") }, svg);
    for (const [dx, level, value] of dots) {
      const dot = el("circle", { cx: dx, cy: base - 6 - level * 8 * scale, r: 3.2, fill: css("soft"), "fill-opacity": .75, class: "mark", "data-tip": `matched random: ${number(value)} nats` }, svg);
      el("title", {}, dot, `matched random: ${number(value)} nats`);
    }
    const labels = [{ at: 0, text: "intact", fill: css("soft") }];
    if (v.random.length) labels.push({ at: v.random.reduce((a, b) => a + b, 0) / v.random.length, text: `${v.random.length} matched random`, fill: css("soft") });
    if (v.bound !== null) {
      const b = x(v.bound), box = el("rect", { x: b - 5, y: base - 12, width: 10, height: 10, fill: css("paper"), stroke: css("ink"), "stroke-width": 1.6, class: "mark", "data-tip": `all heads of these layers: ${number(v.bound)} nats` }, svg);
      el("title", {}, box, `all heads of these layers: ${number(v.bound)} nats`);
      labels.push({ at: v.bound, text: "all heads of these layers", fill: css("ink") });
    }
    if (v.circuit !== null) {
      const cx = x(v.circuit), cy = base - 8, own = css("induction");
      if (v.ci[0] !== null) el("line", { x1: x(v.ci[0]), x2: x(v.ci[1]), y1: cy, y2: cy, stroke: own, "stroke-width": 3 }, svg);
      const d = el("path", { d: `M${cx} ${cy - 8}L${cx + 8} ${cy}L${cx} ${cy + 8}L${cx - 8} ${cy}Z`, fill: own, class: "mark", "data-tip": `circuit: ${number(v.circuit)} nats, interval ${number(v.ci[0])} to ${number(v.ci[1])}` }, svg);
      el("title", {}, d, `circuit: ${number(v.circuit)} nats`);
      labels.push({ at: v.circuit, text: "circuit", fill: own });
    }
    // labels in rows above the plot, moved apart where they would meet
    labels.sort((a, b) => a.at - b.at);
    const gap = 12;
    if (width < 460) for (const l of labels) l.text = { intact: "0", "all heads of these layers": "all heads" }[l.text] || l.text.replace(" matched", "");
    if (width < 460) labels.splice(labels.findIndex((l) => l.text === "0"), 1);
    labels.forEach((l, i) => {
      l.w = l.text.length * 6.6;
      l.px = Math.max(x(l.at), l.w / 2 + 2, i ? labels[i - 1].px + labels[i - 1].w / 2 + gap + l.w / 2 : 0);
    });
    for (let i = labels.length - 1, edge = width + gap - 2; i >= 0; i--) {
      labels[i].px = Math.min(labels[i].px, edge - gap - labels[i].w / 2);
      edge = labels[i].px - labels[i].w / 2;
    }
    for (const l of labels) el("text", { x: l.px, y: 13, "text-anchor": "middle", fill: l.fill, "font-weight": l.text === "circuit" ? 600 : null }, svg, l.text);
    svg.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(".mark");
      mark ? showTip(mark.dataset.tip, event.clientX, event.clientY) : hideTip();
    });
    svg.addEventListener("pointerleave", hideTip);
  }
  function drawSure() {
    const rows = data.leads.slice(0, 24).map((l) => ({
      name: l.head, missing: l.crossing === null && l.rise === null ? "neither seen" : null,
      spans: [
        ...(l.rise === null ? [] : [{ after: l.rise_after, by: l.rise, fill: css("first_token"), hollow: true, text: `${l.head}: PR rise ${between(l.rise_after, l.rise)}` }]),
        ...(l.crossing === null ? [] : [{ after: l.crossing_after, by: l.crossing, fill: css("induction"), text: `${l.head}: crossing ${between(l.crossing_after, l.crossing)}` }]),
      ],
    }));
    if (rows.length) {
      intervalRows("c-lead", rows, "PR rise and selectivity crossing of each circuit head", 60);
      legend(document.getElementById("c-lead"), [{ fill: css("first_token"), text: "PR rise (upper, hollow)" }, { fill: css("induction"), text: "selectivity crossing (lower, solid)" }]);
    } else document.getElementById("f-lead").hidden = true;
    const found = data.recall[cap];
    if (found) lineChart("c-recall", 200, [
      { name: "recall", values: found.recall, stroke: css("induction") }, { name: "precision", values: found.precision, stroke: css("first_token"), dash: "6 3" },
    ], { lo: 0, hi: 1, label: "Recall and precision of the final circuit at each observation", show: (v) => `${Math.round(v * 100)}%`, value: (v) => `${Math.round(100 * v)}%` });
    else document.getElementById("f-recall").hidden = true;
  }

  // -- controls -------------------------------------------------------------------------------------------------
  const slider = document.getElementById("slider"), output = document.getElementById("at"), play = document.getElementById("play");
  slider.max = O - 1;
  function set(o) {
    state.at = o; slider.value = o;
    output.textContent = stamp(o) + (data.used[o] ? "" : ` · left out: ${data.marks[o]}`);
    slider.setAttribute("aria-valuetext", output.textContent);
    maps.forEach((m) => m.draw()); cursors.forEach((c) => c.set());
  }
  slider.addEventListener("input", () => set(Number(slider.value)));
  function stop() { clearInterval(state.timer); state.timer = null; play.textContent = "Play"; play.setAttribute("aria-pressed", "false"); }
  play.addEventListener("click", () => {
    if (state.timer) return stop();
    if (state.at >= O - 1) set(0);
    play.textContent = "Pause"; play.setAttribute("aria-pressed", "true");
    state.timer = setInterval(() => { if (state.at >= O - 1) stop(); else set(state.at + 1); }, Math.max(60, Math.min(300, 9000 / O)));
  });
  const scaleButton = document.getElementById("scale");
  const nameScale = () => { scaleButton.textContent = useLog ? "Plain time axis" : "Logarithmic time axis"; };
  scaleButton.hidden = !canLog;
  nameScale();
  scaleButton.addEventListener("click", () => { useLog = !useLog; nameScale(); drawAll(); });
  const metric = document.getElementById("metric");
  for (const m of metrics) { const option = document.createElement("option"); option.value = m.id; option.textContent = m.text; option.selected = m === state.metric; metric.append(option); }
  metric.addEventListener("change", () => { state.metric = metrics.find((m) => m.id === metric.value); drawMaps(); });
  document.getElementById("clear").addEventListener("click", () => { state.followed = data.followed.slice(); drawFollowed(); maps.forEach((m) => m.draw()); });
  document.querySelectorAll("table[data-name]").forEach((table) => {
    const caption = table.closest("figure").querySelector("figcaption"), button = document.createElement("button");
    button.type = "button"; button.className = "csv"; button.textContent = "CSV"; button.title = "Save this table as CSV";
    button.addEventListener("click", () => {
      const quote = (text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
      const text = [...table.rows].map((row) => [...row.cells].map((cell) => quote(cell.textContent)).join(",")).join("\n") + "\n";
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" })); link.download = `${table.dataset.name}.csv`; link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
    caption.append(button);
  });

  function drawAll() {
    cursors = [];
    drawWhen(); drawMaps(); drawFollowed(); drawVerdicts(); drawSinks(); drawSure();
    set(state.at);
  }
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const theme = (name) => { root.dataset.theme = name; drawAll(); };
  document.getElementById("theme").addEventListener("click", () => { chosen = dark() ? "light" : "dark"; theme(chosen); });
  preferred.addEventListener("change", () => { if (!chosen) theme(preferred.matches ? "dark" : "light"); });
  let before = null;
  addEventListener("beforeprint", () => {
    before = { theme: root.dataset.theme, open: [...document.querySelectorAll("details")].map((d) => d.open) };
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
    printing = true;
    theme("light");
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    document.querySelectorAll("details").forEach((d, i) => { d.open = before.open[i]; });
    printing = false;
    theme(before.theme); before = null;
  });
  let waiting = null, lastWidth = innerWidth;
  addEventListener("resize", () => { if (innerWidth === lastWidth) return; lastWidth = innerWidth; clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
  theme(preferred.matches ? "dark" : "light");
  root.dataset.ready = "yes";
})();
