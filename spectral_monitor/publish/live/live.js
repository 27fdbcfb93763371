"use strict";
// The live page: asks for the run's data once a second and redraws what changed. Nothing is ever sent to the server.
(() => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  const NS = "http://www.w3.org/2000/svg";
  const state = { data: null, tag: "", probe: 0, at: null, look: null, lookKey: "", skew: 0, seen: null, only: null, trouble: "" };

  // -- small things -----------------------------------------------------------------------------------------------
  function el(name, attributes = {}, parent = null, text = null) {
    const node = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }
  function tag(name, className, text, parent) {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined && text !== null) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }
  const known = (v) => v !== null && v !== undefined && Number.isFinite(v);
  function number(v, digits = 3) {
    if (!known(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e5 || size < 1e-3) return v.toExponential(1).replace("e+", "e");
    return size >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(digits)));
  }
  function tokens(v) {
    if (!known(v)) return "–";
    for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]]) if (v >= size) return `${Number((v / size).toPrecision(3))}${unit}`;
    return String(Math.round(v));
  }
  const percent = (v) => (known(v) ? `${(100 * v).toFixed(v < 0.1 ? 2 : 1).replace(/\.?0+$/, "")}%` : "–");
  const words = (name) => name.replace(/_/g, "-");
  const css = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const dark = () => root.dataset.theme === "dark";
  const ago = (s) => (s < 120 ? `${Math.max(0, Math.round(s))} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
  const LINES = ["induction", "first_token", "previous_token", "self", "duplicate_token", "local"];
  const DASHES = ["", "7 3", "2 3"];
  const style = (i) => ({ stroke: css(LINES[i % 6]), dash: DASHES[Math.floor(i / 6) % 3] });
  const RAMP = { light: [[247, 245, 240], [222, 226, 200], [140, 196, 176], [58, 145, 163], [34, 84, 134], [26, 32, 84]], dark: [[30, 34, 39], [40, 52, 86], [42, 92, 142], [58, 150, 164], [134, 204, 148], [240, 242, 178]] };
  function ramp(t) {
    const stops = RAMP[dark() ? "dark" : "light"], x = Math.min(1, Math.max(0, t)) * (stops.length - 1);
    const i = Math.min(stops.length - 2, Math.floor(x));
    return `rgb(${stops[i].map((v, j) => Math.round(v + (stops[i + 1][j] - v) * (x - i))).join(",")})`;
  }
  function tip(text, event) {
    const box = $("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(6, event.clientX + 16 + width > innerWidth ? event.clientX - width - 14 : event.clientX + 16)}px`;
    box.style.top = `${Math.max(6, Math.min(innerHeight - height - 6, event.clientY + 14))}px`;
  }
  const noTip = () => { $("tip").hidden = true; };

  // -- scales -----------------------------------------------------------------------------------------------------
  const probe = () => state.data.probes[state.probe];
  const hasTokens = () => probe().tokens.every((t) => t !== null);
  const onTokens = () => $("axis").value === "tokens" && hasTokens();
  const xs = () => (onTokens() ? probe().tokens : probe().steps);
  const place = (o) => `step ${probe().steps[o]}` + (probe().tokens[o] !== null ? ` · ${tokens(probe().tokens[o])} tokens` : "");

  function xScale(left, right) {
    const all = xs(), log = $("log").checked;
    const positive = all.filter((x) => x > 0);
    const zero = log && all.some((x) => x <= 0);
    const start = zero ? left + 34 : left;
    const lo = log ? Math.min(...positive) : Math.min(...all), hi = log ? Math.max(...positive) : Math.max(...all);
    const f = (x) => (log ? Math.log(x) : x);
    const at = (x) => (log && x <= 0 ? left + 6 : hi > lo ? start + (right - start) * (f(x) - f(lo)) / (f(hi) - f(lo)) : positive.length || !log ? (start + right) / 2 : left + 6);
    const ticks = zero ? [[0, "0"]] : [];
    if (positive.length || !log) {
      const show = (x) => (onTokens() ? tokens(x) : x >= 1e4 ? tokens(x) : String(Math.round(x)));
      if (log) {
        const decades = Math.log10(hi / lo);
        const marks = decades > 5 ? [1] : decades > 2.2 ? [1, 3] : [1, 2, 5];
        for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++) for (const m of marks) {
          const x = m * 10 ** e;
          if (x >= lo * 0.999 && x <= hi * 1.001) ticks.push([x, show(x)]);
        }
        if (ticks.length < (zero ? 2 : 1)) ticks.push([hi, show(hi)]);
      } else for (const x of steps(lo, hi, 6)) ticks.push([x, show(x)]);
    }
    const kept = [];
    for (const [x, text] of ticks) if (!kept.length || at(x) - at(kept[kept.length - 1][0]) > 30) kept.push([x, text]);
    return { at, ticks: kept, zero };
  }
  function steps(lo, hi, count) {
    if (!(hi > lo)) return [lo];
    const raw = (hi - lo) / count, mag = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * mag).find((s) => s >= raw * 0.999);
    const found = [];
    for (let v = Math.ceil(lo / step - 1e-9) * step; v <= hi + step * 1e-6; v += step) found.push(Number(v.toPrecision(10)));
    return found;
  }
  function yScale(lo, hi, bottom, top, log) {
    const f = (v) => (log ? Math.log(Math.max(v, lo)) : v);
    const at = (v) => bottom + (top - bottom) * (f(v) - f(lo)) / ((f(hi) - f(lo)) || 1);
    let ticks = log ? [] : steps(lo, hi, 4);
    if (log) {
      const decades = Math.log10(hi / lo);
      for (let e = Math.floor(Math.log10(lo)); e <= Math.ceil(Math.log10(hi)); e++) for (const m of decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5]) {
        const v = m * 10 ** e;
        if (v >= lo * 0.999 && v <= hi * 1.001) ticks.push(v);
      }
    }
    return { at, ticks };
  }

  // -- line charts ------------------------------------------------------------------------------------------------
  function lines(id, series, options = {}) {
    const host = $(id), width = Math.max(280, host.clientWidth || 560), height = options.height || 220;
    const names = Math.max(0, ...series.map((s) => s.name.length));
    const left = 46, right = width - (options.ends === false ? 12 : Math.min(120, names * 7 + 22)), top = 10, bottom = height - 26;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label || "" });
    const x = xScale(left, right);
    const values = series.flatMap((s) => s.values).filter(known);
    if (!values.length) {
      el("text", { x: left, y: height / 2, fill: css("soft") }, svg, "not measured yet");
      host.replaceChildren(svg);
      return;
    }
    const bars = (options.bars || []).map((b) => b.value);
    let lo = options.lo ?? Math.min(...values, ...(options.log ? bars : [])), hi = options.hi ?? Math.max(...values, ...bars);
    if (options.log) { lo = Math.max(lo, options.floor || 1e-3); hi = Math.max(hi, lo * 1.5); } else if (hi <= lo) { hi = lo + (Math.abs(lo) || 1) * 0.1; }
    if (options.hi === undefined && !options.log) hi += (hi - lo) * 0.06;
    const y = yScale(lo, hi, bottom, top, options.log), show = options.show || ((v) => number(v, 2));
    for (const v of y.ticks) {
      el("line", { x1: left, x2: right, y1: y.at(v), y2: y.at(v), stroke: css("grid") }, svg);
      el("text", { x: left - 8, y: y.at(v) + 4, "text-anchor": "end", fill: css("soft") }, svg, show(v));
    }
    for (const [v, text] of x.ticks) el("text", { x: x.at(v), y: bottom + 18, "text-anchor": "middle", fill: css("soft") }, svg, text);
    for (const bar of options.bars || []) {
      el("line", { x1: left, x2: right, y1: y.at(bar.value), y2: y.at(bar.value), stroke: css("soft"), "stroke-dasharray": "4 4" }, svg);
      el("text", { x: left + 4, y: y.at(bar.value) - 5, fill: css("soft") }, svg, bar.text);
    }
    moments(svg, x, top, bottom);
    const at = xs(), ends = [];
    series.forEach((s) => {
      const points = s.values.map((v, o) => (known(v) ? [x.at(at[o]), y.at(v)] : null));
      const faint = state.only !== null && s.head && state.only !== s.name;
      const group = el("g", { opacity: faint ? 0.15 : 1 }, svg);
      let d = "", pen = false;
      for (const p of points) { if (p) { d += `${pen ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`; pen = true; } else pen = false; }
      el("path", { d, fill: "none", stroke: s.stroke, "stroke-width": s.strong ? 2.2 : 1.4, "stroke-dasharray": s.dash || "", "stroke-linejoin": "round" }, group);
      const last = points.filter(Boolean).pop();
      if (points.filter(Boolean).length < 40) for (const p of points) if (p) el("circle", { cx: p[0], cy: p[1], r: 1.9, fill: s.stroke }, group);
      if (last) { el("circle", { cx: last[0], cy: last[1], r: 3, fill: s.stroke }, group); ends.push({ y: last[1], name: s.name, stroke: s.stroke, faint }); }
      for (const o of s.alarms || []) if (points[o]) el("path", { d: `M${points[o][0]} ${points[o][1] - 15}l6 10h-12z`, fill: css("panel"), stroke: s.stroke, "stroke-width": 2 }, group);
    });
    if (options.ends !== false) {
      ends.sort((a, b) => a.y - b.y);
      let free = -Infinity;
      for (const end of ends) {
        const y = Math.max(end.y, free);
        if (y - end.y > 27 || y > bottom + 6) continue; // a name that has no room is in the tip and in the chips
        el("text", { x: right + 8, y: y + 4, fill: end.stroke, opacity: end.faint ? 0.2 : 1 }, svg, end.name);
        free = y + 13;
      }
    }
    const cursor = el("line", { y1: top, y2: bottom, stroke: css("faint"), visibility: "hidden" }, svg);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * width / box.width;
      const o = at.reduce((best, v, i) => (Math.abs(x.at(v) - px) < Math.abs(x.at(at[best]) - px) ? i : best), 0);
      cursor.setAttribute("x1", x.at(at[o])); cursor.setAttribute("x2", x.at(at[o])); cursor.setAttribute("visibility", "visible");
      const rows = series.map((s) => [s.name, s.values[o]]).filter(([, v]) => known(v)).sort((a, b) => b[1] - a[1]);
      const notes = [probe().label[o], probe().mark[o], probe().finite[o] ? null : "not finite", probe().attempt[o] > 1 ? `attempt ${probe().attempt[o]}` : null].filter(Boolean);
      tip([place(o), ...notes, ...rows.map(([name, v]) => `${name}  ${(options.value || number)(v)}`)].join("\n"), event);
    });
    svg.addEventListener("pointerleave", () => { noTip(); cursor.setAttribute("visibility", "hidden"); });
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * width / box.width;
      state.at = at.reduce((best, v, i) => (Math.abs(x.at(v) - px) < Math.abs(x.at(at[best]) - px) ? i : best), 0);
      drawMap();
    });
    host.replaceChildren(svg);
  }

  /** Verdicts and crossings as fine vertical lines, in every chart over time. */
  function moments(svg, x, top, bottom) {
    const all = xs(), lo = Math.min(...all), hi = Math.max(...all);
    const of = (item) => (onTokens() ? item.tokens : item.step);
    const within = (item) => of(item) !== null && of(item) >= lo && of(item) <= hi && (!item.probe || item.probe === probe().name);
    for (const event of state.data.events.filter((e) => within(e) && e.kind === "selectivity_crossing"))
      el("line", { x1: x.at(of(event)), x2: x.at(of(event)), y1: top, y2: bottom, stroke: css("accent"), opacity: 0.35, "stroke-dasharray": "2 3" }, svg);
    for (const verdict of state.data.verdicts.filter((v) => within(v) && v.verdict === "causal"))
      el("line", { x1: x.at(of(verdict)), x2: x.at(of(verdict)), y1: top, y2: bottom, stroke: css("previous_token"), opacity: 0.7 }, svg);
  }

  function areas(id, parts) {
    const host = $(id), width = Math.max(280, host.clientWidth || 560), height = 220;
    const left = 46, right = width - 12, top = 10, bottom = height - 26;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "share of heads by class" });
    const x = xScale(left, right), y = yScale(0, 1, bottom, top, false), at = xs();
    let base = at.map(() => 0);
    for (const part of parts) {
      const upper = base.map((b, o) => b + (part.values[o] || 0));
      const forth = upper.map((v, o) => `${x.at(at[o]).toFixed(1)} ${y.at(v).toFixed(1)}`), back = base.map((v, o) => `${x.at(at[o]).toFixed(1)} ${y.at(v).toFixed(1)}`).reverse();
      if (at.length > 1) el("path", { d: `M${forth.join("L")}L${back.join("L")}Z`, fill: css(part.name), opacity: part.name === "none" ? 0.3 : 0.85 }, svg);
      else el("rect", { x: left, width: right - left, y: y.at(upper[0]), height: Math.max(0, y.at(base[0]) - y.at(upper[0])), fill: css(part.name), opacity: part.name === "none" ? 0.3 : 0.85 }, svg);
      base = upper;
    }
    for (const v of [0, 0.25, 0.5, 0.75, 1]) el("text", { x: left - 8, y: y.at(v) + 4, "text-anchor": "end", fill: css("soft") }, svg, percent(v));
    for (const [v, text] of x.ticks) el("text", { x: x.at(v), y: bottom + 18, "text-anchor": "middle", fill: css("soft") }, svg, text);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * width / box.width;
      const o = at.reduce((best, v, i) => (Math.abs(x.at(v) - px) < Math.abs(x.at(at[best]) - px) ? i : best), 0);
      tip([place(o), ...parts.filter((p) => p.values[o]).map((p) => `${p.name === "none" ? "unclassified" : words(p.name)}  ${percent(p.values[o])}`)].join("\n"), event);
    });
    svg.addEventListener("pointerleave", noTip);
    host.replaceChildren(svg);
  }

  function sinks(id) {
    const host = $(id), width = Math.max(280, host.clientWidth || 560), height = 220, p = probe();
    const left = 46, right = width - 12, top = 10, bottom = height - 26;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "first-token heads by layer" });
    const x = xScale(left, right), at = xs().map((v) => x.at(v)), rows = p.layers.length, h = (bottom - top) / rows;
    p.first_token_by_layer.forEach((column, o) => {
      const from = o ? (at[o - 1] + at[o]) / 2 : left, to = o + 1 < at.length ? (at[o] + at[o + 1]) / 2 : right;
      column.forEach((v, r) => el("rect", { x: from, y: bottom - (r + 1) * h, width: Math.max(0.5, to - from + 0.3), height: h + 0.3, fill: known(v) ? ramp(v) : css("grid") }, svg));
    });
    const every = Math.ceil(rows / 8);
    p.layers.forEach((layer, r) => { if (r % every === 0) el("text", { x: left - 8, y: bottom - (r + 0.5) * h + 4, "text-anchor": "end", fill: css("soft") }, svg, `L${layer}`); });
    for (const [v, text] of x.ticks) el("text", { x: x.at(v), y: bottom + 18, "text-anchor": "middle", fill: css("soft") }, svg, text);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * width / box.width, py = (event.clientY - box.top) * height / box.height;
      const o = at.reduce((best, v, i) => (Math.abs(v - px) < Math.abs(at[best] - px) ? i : best), 0), r = Math.floor((bottom - py) / h);
      if (r < 0 || r >= rows) return noTip();
      tip(`${place(o)}\nlayer ${p.layers[r]}: ${percent(p.first_token_by_layer[o][r])} of its heads`, event);
    });
    svg.addEventListener("pointerleave", noTip);
    host.replaceChildren(svg);
  }

  // -- the map of heads -------------------------------------------------------------------------------------------
  async function drawMap() {
    const p = probe(), last = p.steps.length - 1;
    const slider = $("slider"), at = state.at === null || state.at > last ? last : state.at;
    slider.max = last; slider.value = at;
    slider.setAttribute("aria-valuetext", place(at));
    $("at").textContent = place(at);
    $("newest").setAttribute("aria-pressed", String(state.at === null));
    const key = `${p.name}/${p.steps[at]}/${p.attempt[at]}/${p.time[at]}`;
    if (state.lookKey !== key) {
      state.lookKey = key;
      const answer = await fetch(`/look.json?probe=${encodeURIComponent(p.name)}&step=${p.steps[at]}`, { cache: "no-store" }).catch(() => null);
      if (!answer || !answer.ok || state.lookKey !== key) { if (state.lookKey === key) state.lookKey = ""; return; }
      state.look = await answer.json();
    }
    paint();
  }

  function paint() {
    if (!state.look) return;
    paintOne($("map-pr"), "pr");
    paintOne($("map"), $("metric").value);
  }
  function paintOne(host, metric) {
    const look = state.look, canvas = host.querySelector("canvas"), values = look[metric];
    const layers = [...new Set(look.layer)], row = new Map(layers.map((l, r) => [l, r])), columns = Math.max(...look.head) + 1;
    const left = 40, top = 22, width = Math.max(280, host.clientWidth || 800);
    const side = Math.max(6, Math.min(40, Math.floor((width - left) / columns))), tall = Math.max(6, Math.min(side, Math.floor(560 / layers.length)));
    const scale = devicePixelRatio || 1;
    const w = left + columns * side, h = top + layers.length * tall;
    canvas.width = w * scale; canvas.height = h * scale;
    canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, w, h);
    pen.font = `12px ${css("sans")}`;
    pen.fillStyle = css("soft");
    const finite = metric === "head_class" ? [] : values.filter(known);
    const hi = metric === "attention" || metric === "first_token" ? 1 : finite.length ? Math.max(...finite) : 1;
    const lo = metric === "pr" ? 1 : metric === "selectivity" ? Math.max(0.1, Math.min(...(finite.length ? finite : [1]))) : 0;
    const t = (v) => (metric === "selectivity" ? Math.log(Math.max(v, lo) / lo) / Math.log(Math.max(hi, lo * 1.01) / lo) : (v - lo) / ((hi - lo) || 1));
    layers.forEach((layer, r) => { if (tall >= 11 || r % Math.ceil(12 / tall) === 0) pen.fillText(`L${layer}`, 4, top + r * tall + tall / 2 + 4); });
    for (let c = 0; c < columns; c++) if (side >= 26 || c % Math.ceil(28 / side) === 0) pen.fillText(`H${c}`, left + c * side + 1, 14);
    const marked = new Map(probe().followed.map((head) => [head.name, head.reason]));
    look.layer.forEach((layer, k) => {
      const x = left + look.head[k] * side, y = top + row.get(layer) * tall, gap = side > 8 ? 1.5 : 0.5;
      const name = `L${layer}H${look.head[k]}`;
      if (look.status[k] !== "ok") pen.fillStyle = css("warn");
      else if (metric === "head_class") pen.fillStyle = css(look.head_class[k]) || css("grid");
      else pen.fillStyle = known(values[k]) ? ramp(t(values[k])) : css("grid");
      pen.globalAlpha = metric === "head_class" && look.head_class[k] === "none" && look.status[k] === "ok" ? 0.3 : 1;
      pen.fillRect(x, y, side - gap, tall - gap);
      pen.globalAlpha = 1;
      if (["circuit", "crossed"].includes(marked.get(name))) {
        pen.strokeStyle = css("warn"); pen.lineWidth = 2;
        pen.strokeRect(x + 0.5, y + 0.5, side - gap - 1, tall - gap - 1);
      }
    });
    canvas.cellAt = (event) => {
      const box = canvas.getBoundingClientRect();
      const c = Math.floor((event.clientX - box.left - left) / side), r = Math.floor((event.clientY - box.top - top) / tall);
      return look.layer.findIndex((layer, k) => row.get(layer) === r && look.head[k] === c);
    };
    const legend = host.nextElementSibling;
    legend.replaceChildren();
    if (metric === "head_class") classLegend(legend);
    else {
      tag("span", "", number(lo), legend);
      const strip = tag("canvas", "ramp", null, legend);
      strip.width = 150; strip.height = 9;
      const s = strip.getContext("2d");
      for (let i = 0; i < 150; i++) { s.fillStyle = ramp(i / 149); s.fillRect(i, 0, 1, 9); }
      tag("span", "", number(hi) + (metric === "selectivity" ? " (logarithmic)" : ""), legend);
    }
    tag("span", "", "framed: crossed the bar or in a checked circuit", legend);
    if (look.status.some((s) => s !== "ok")) { const mark = tag("i", "", null, legend); mark.style.background = css("warn"); tag("span", "", "dead or not finite", legend); }
  }
  function classLegend(host) {
    for (const name of state.data.classes) {
      const mark = tag("i", "", null, host);
      mark.style.background = css(name);
      if (name === "none") mark.style.opacity = 0.4;
      tag("span", "", name === "none" ? "unclassified" : words(name), host);
    }
  }

  // -- parts ------------------------------------------------------------------------------------------------------
  function facts() {
    const p = probe(), o = p.steps.length - 1, host = $("facts");
    const bars = state.data.bars;
    const over = p.followed.filter((h) => h.selectivity[o] >= bars.selectivity && h.attention[o] >= bars.attention);
    const last = state.data.verdicts.filter((v) => v.probe === p.name).pop();
    const rows = [
      ["step", p.steps[o].toLocaleString("en")],
      ["training tokens", tokens(p.tokens[o]), p.estimated ? "estimated" : ""],
      ["looks", String(p.steps.length)],
      [`${p.name} probe, top-1`, percent(p.top1[o])],
      ["heads over both bars", String(over.length) + (over.length >= 12 ? "+" : ""), over.slice(0, 3).map((h) => h.name).join(" ")],
      ["last causal check", last ? last.verdict : "none yet", last ? `step ${last.step}` : ""],
      ["monitor’s share of time", percent(p.share[o])],
    ];
    host.replaceChildren(...rows.map(([name, value, note]) => {
      const box = document.createElement("div");
      tag("dt", "", name, box);
      const dd = tag("dd", "", value, box);
      if (note) tag("small", "", note, dd);
      return box;
    }));
  }

  function events() {
    const host = $("events"), all = [];
    const skip = new Set(["candidates_changed"]);
    for (const event of state.data.events) if (!skip.has(event.kind)) all.push({
      key: `e${event.kind}${event.probe}${event.capability}${event.heads}${event.direction}${event.step}`, step: event.step, what: words(event.kind).replace(/-/g, " "),
      text: event.text || [event.heads.join(" "), event.direction].filter(Boolean).join(" "),
    });
    for (const v of state.data.verdicts) all.push({
      key: `v${v.probe}${v.capability}${v.mode}${v.step}`, step: v.step, what: "causal check", strong: true,
      text: `${v.capability} (${v.mode} ablation): ${v.verdict}` + (known(v.p_value) ? `, p = ${number(v.p_value, 2)} over ${v.draws} draws` : ""),
    });
    all.sort((a, b) => b.step - a.step);
    const first = state.seen === null, fresh = new Set(all.map((e) => e.key));
    host.replaceChildren(...(all.length ? all : [{ empty: true }]).map((item) => {
      if (item.empty) return tag("p", "empty", "No crossing, no alarm and no causal check yet.");
      const line = tag("p", !first && !state.seen.has(item.key) ? "new" : "");
      tag("span", "", `step ${item.step}`, line);
      tag("span", "", item.what, line);
      tag(item.strong ? "b" : "span", "", item.text, line);
      return line;
    }));
    state.seen = fresh;
  }

  function chips(series) {
    const host = $("names");
    host.replaceChildren(...series.map((s) => {
      const chip = tag("span", `chip${state.only !== null && state.only !== s.name ? " off" : ""}`);
      const mark = el("svg", { viewBox: "0 0 22 8" });
      el("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: s.stroke, "stroke-width": 2.4, "stroke-dasharray": s.dash }, mark);
      chip.append(mark, s.name);
      if (s.reason !== "strongest") tag("small", "", s.reason, chip);
      chip.tabIndex = 0;
      const only = (name) => () => { state.only = name; heads(); };
      chip.addEventListener("pointerenter", only(s.name));
      chip.addEventListener("pointerleave", only(null));
      chip.addEventListener("focus", () => { state.only = s.name; charts(); });
      chip.addEventListener("blur", () => { state.only = null; charts(); });
      return chip;
    }));
  }
  function series() {
    const p = probe();
    return p.followed.map((head, i) => ({
      ...head, ...style(i), head: true, strong: head.reason !== "strongest",
      alarms: state.data.events.filter((e) => ["pr_rise", "content_rise", "attention_rise"].includes(e.kind) && (!e.probe || e.probe === p.name) && e.heads.includes(head.name)).map((e) => p.steps.indexOf(e.step)).filter((o) => o >= 0),
    }));
  }
  function charts() {
    const all = series(), bars = state.data.bars;
    const of = (what, alarms) => all.map((s) => ({ ...s, values: s[what], alarms: alarms ? s.alarms : [] }));
    lines("c-attention", of("attention"), { lo: 0, hi: 1, height: 250, label: "attention of followed heads" });
    lines("c-pr", of("pr", true), { label: "effective rank of followed heads" });
    lines("c-selectivity", of("selectivity"), { log: true, floor: 0.1, bars: [{ value: bars.selectivity, text: `${number(bars.selectivity)}x` }], value: (v) => `${number(v)}x`, show: (v) => `${number(v, 2)}`, label: "selectivity of followed heads" });
    return all;
  }
  let pending = 0;
  function heads() {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => { const all = charts(); document.querySelectorAll("#names .chip").forEach((chip, i) => chip.classList.toggle("off", state.only !== null && all[i] && all[i].name !== state.only)); });
  }

  function verdicts() {
    const host = $("verdicts"), newest = new Map();
    for (const v of state.data.verdicts) if (v.probe === probe().name) newest.set(`${v.capability}/${v.mode}`, v);
    if (!newest.size) {
      host.replaceChildren(tag("p", "quiet-text", "No causal check yet: it runs when the set of candidate heads changes. Until then the charts say what heads attend to, not that the model uses them."));
      return;
    }
    host.replaceChildren(...[...newest.values()].reverse().map((v) => {
      const card = tag("div", "verdict"), title = tag("h3", "", null, card);
      tag("span", `badge ${v.verdict === "causal" ? "causal" : ""}`, v.verdict, title);
      title.append(`${words(v.capability)}, ${v.mode} ablation, step ${v.step}`);
      tag("p", "", `${v.heads.join(" ")}. ${v.reason}`, card);
      const chart = tag("div", "chart strip", null, card);
      requestAnimationFrame(() => strip(chart, v));
      return card;
    }));
  }
  /** Fall of the target's log-probability: matched-random draws as dots, the circuit and the upper bound as marks. */
  function strip(host, v) {
    const all = [...v.random, v.circuit, v.bound, 0].filter(known);
    if (all.length < 2) return;
    const width = Math.max(280, host.clientWidth || 560), height = 94, left = 14, right = width - 24, base = 50;
    const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "fall of the target log-probability by condition" });
    const lo = Math.min(...all), hi = Math.max(...all), pad = (hi - lo) * 0.03 || 0.1;
    const x = (value) => left + (right - left) * (value - lo + pad) / (hi - lo + 2 * pad);
    el("line", { x1: left, x2: right, y1: base, y2: base, stroke: css("rule") }, svg);
    for (const t of steps(lo, hi, Math.max(3, Math.floor(width / 160)))) {
      el("line", { x1: x(t), x2: x(t), y1: base, y2: base + 5, stroke: css("faint") }, svg);
      el("text", { x: x(t), y: base + 20, "text-anchor": "middle", fill: css("soft") }, svg, number(t, 2));
    }
    el("text", { x: left, y: base + 38, fill: css("soft") }, svg, "nats of log-probability lost on the target");
    v.random.forEach((value, i) => { if (known(value)) el("circle", { cx: x(value), cy: base - 3 - (i % 4) * 4, r: 3.4, fill: css("first_token"), opacity: 0.55 }, svg); });
    const mark = (value, text, colour, y) => { // names stand left of their marks, in two rows: no mark crosses a name
      if (!known(value)) return;
      el("line", { x1: x(value), x2: x(value), y1: y - 9, y2: base, stroke: colour, "stroke-width": 2.4 }, svg);
      const end = x(value) > width * 0.4;
      el("text", { x: x(value) + (end ? -6 : 6), y, "text-anchor": end ? "end" : "start", fill: colour, "font-weight": 600 }, svg, text);
    };
    if (v.ci.every(known)) el("line", { x1: x(Math.max(lo, v.ci[0])), x2: x(Math.min(hi + pad, v.ci[1])), y1: base, y2: base, stroke: css("induction"), "stroke-width": 4, opacity: 0.4 }, svg);
    mark(v.bound, "all heads of these layers out", css("soft"), 12);
    mark(v.circuit, "circuit out", css("induction"), 30);
    if (v.random.length) el("text", { x: x(Math.max(...v.random.filter(known))) + 8, y: base - 8, fill: css("first_token") }, svg, `${v.random.length} matched-random draws`);
    host.replaceChildren(svg);
  }

  // -- drawing it all ---------------------------------------------------------------------------------------------
  function draw() {
    const data = state.data;
    document.title = `${data.name} · spectral monitor`;
    $("name").textContent = data.name;
    $("dir").textContent = `spectral_monitor · live · ${data.run_dir}` + (data.model ? ` · ${data.model}` : "");
    $("main").hidden = !data.probes.length;
    if (!data.probes.length) return;
    const choice = $("probe");
    if (choice.options.length !== data.probes.length) {
      choice.replaceChildren(...data.probes.map((p, i) => { const option = tag("option", "", p.name); option.value = i; return option; }));
      $("probe-choice").hidden = data.probes.length < 2;
    }
    const p = probe();
    $("axis").disabled = !hasTokens();
    facts();
    const colour = (name) => css(name);
    lines("c-accuracy", [{ name: "top-1", values: p.top1, stroke: colour("induction"), strong: true }, { name: "top-5", values: p.top5, stroke: colour("first_token"), dash: "7 3" }], { lo: 0, hi: 1, show: percent, value: percent, label: "probe accuracy" });
    lines("c-loss", [{ name: "loss", values: p.loss, stroke: colour("accent"), strong: true }], { lo: 0, label: "probe loss", ends: false });
    events();
    $("heads-say").textContent = `Heads of a checked circuit, heads that crossed the bar, and the strongest of the rest, by attention on the ${words(p.target)} target. Dotted lines: a head crosses; solid green: a causal verdict. Point at a name to see one head alone.`;
    chips(charts());
    verdicts();
    areas("c-classes", data.classes.map((name) => ({ name, values: p.fractions[name] })));
    $("class-legend").replaceChildren();
    classLegend($("class-legend"));
    sinks("c-sinks");
    lines("c-seconds", [{ name: "seconds", values: p.seconds, stroke: colour("accent") }], { lo: 0, ends: false, label: "seconds a look" });
    lines("c-share", [{ name: "share", values: p.share, stroke: colour("accent") }], { lo: 0, show: percent, value: percent, ends: false, label: "share of time" });
    $("foot").textContent = `Probe ${p.name}: ${p.rows} rows${p.length ? ` of ${p.length} tokens` : ""}, SHA-256 ${p.fingerprint.slice(0, 12)}…; selectivity over the '${p.baseline}' baseline.`;
    drawMap();
  }

  function status(kind, text) {
    const line = $("status");
    line.className = `status ${kind}`;
    if (line.lastElementChild.textContent !== text) line.lastElementChild.textContent = text;
  }
  function heartbeat() {
    const data = state.data;
    if (state.trouble) return status("lost", state.trouble);
    if (!data) return;
    if (!data.probes.length) return status("quiet", "the run has no observation yet: the first look comes before the first update");
    const p = probe(), time = p.time[p.time.length - 1];
    if (!known(time)) return status("live", "up to date");
    const age = (Date.now() + state.skew) / 1000 - time;
    status(age < 600 ? "live" : "quiet", `last look ${ago(age)} ago` + (age < 600 ? "" : ": the run has ended, waits, or looks rarely by now"));
  }

  async function poll() {
    try {
      const answer = await fetch("/live.json", { cache: "no-store", headers: state.tag ? { "If-None-Match": state.tag } : {} });
      const date = Date.parse(answer.headers.get("Date"));
      if (known(date) && Math.abs(date - Date.now()) > 3000) state.skew = date - Date.now(); // a forwarded port: the other machine's clock counts
      if (answer.status === 200) {
        state.tag = answer.headers.get("ETag");
        state.data = await answer.json();
        state.probe = Math.min(state.probe, Math.max(0, state.data.probes.length - 1));
        draw();
        root.dataset.version = state.data.version;
      }
      const body = answer.status >= 400 ? await answer.json().catch(() => ({})) : null;
      state.trouble = body ? body.error || `the server answered ${answer.status}` : "";
    } catch (error) {
      state.trouble = "the server does not answer: spectral-monitor serve has ended, or the connection is lost";
    }
    heartbeat();
    setTimeout(poll, document.hidden ? 5000 : 1000);
  }

  // -- controls ---------------------------------------------------------------------------------------------------
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const redraw = () => { if (state.data) draw(); };
  $("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); });
  $("axis").addEventListener("change", redraw);
  $("log").addEventListener("change", redraw);
  $("probe").addEventListener("change", () => { state.probe = Number($("probe").value); state.at = null; state.only = null; redraw(); });
  $("metric").addEventListener("change", paint);
  $("slider").addEventListener("input", () => { state.at = Number($("slider").value); drawMap(); });
  $("newest").addEventListener("click", () => { state.at = state.at === null ? Number($("slider").value) : null; drawMap(); });
  for (const canvas of document.querySelectorAll(".map canvas")) {
    canvas.addEventListener("pointermove", (event) => {
      const k = canvas.cellAt ? canvas.cellAt(event) : -1, look = state.look;
      if (k < 0) return noTip();
      const name = look.head_class[k] === "none" ? "unclassified" : words(look.head_class[k]);
      tip([`L${look.layer[k]}H${look.head[k]} · ${name}` + (look.status[k] === "ok" ? "" : ` · ${words(look.status[k])}`), `PR ${number(look.pr[k])}`, `attention on the target ${number(look.attention[k])}`, `selectivity ${number(look.selectivity[k])}x`, `attention on the first token ${number(look.first_token[k])}`].join("\n"), event);
    });
    canvas.addEventListener("pointerleave", noTip);
  }
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 120); });
  setInterval(heartbeat, 1000);
  poll();
})();
