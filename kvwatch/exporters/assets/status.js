// Draws /api/v1/state every two seconds. Text only ever becomes text nodes and attributes,
// so nothing that a process calls itself can become markup.
"use strict";

const POLL_MS = 2000;
const TIMEOUT_MS = 5000;
const KEPT_EVENTS = 60;
const SIGN = { red: "▲", yellow: "!", green: "✓", unknown: "?" };
const ORDER = { red: 0, yellow: 1, unknown: 2, green: 3 };
const PARTS = {
  driver_reserved: "driver", reserved: "driver", used: "used", weights: "weights", kv_used: "KV in use", kv_free: "KV free", engine_other: "engine, other",
  other_process: "other processes", dead_process: "dead processes", unattributed: "unattributed", free: "free",
};
const UNIT = {
  kv_usage: "ratio", recompute_tax: "ratio", latency_slo: "times", device_headroom: "bytes", device_exhaustion: "s",
  alloc_retries: "per_min", largest_allocatable: "bytes", allocator_fragmentation: "ratio", kv_block_waste: "ratio",
  dead_process_memory: "bytes",
};
const REASON = {
  below: "within its thresholds", crossed: "at or beyond the threshold", capped: "beyond it, but what else red needs does not hold",
  holding: "recovered; waits out `hold`", pending: "beyond the threshold; waits out `for`", stale_held: "the input is old; the last level is kept for now",
  stale: "the input is too old", not_reported: "nothing reports this value here", too_few: "too few samples or observations yet",
  starting: "the server is starting", maintenance: "the GPU is in maintenance", disabled: "switched off in the configuration",
};
const EXPECTED = {
  stable: "not filling", saturated: "full now", unknown: "unknown",
};

// --- building and patching the page

const SVG = "http://www.w3.org/2000/svg";

function h(tag, attrs, ...children) {
  const svg = tag === "svg" || tag === "rect" || tag === "title";
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

// Make `old` look like `next` and touch only what differs: selections, focus and open details stay.
function patch(old, next) {
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName) { old.replaceWith(next); return; }
  if (old.nodeType === Node.TEXT_NODE) { if (old.data !== next.data) old.data = next.data; return; }
  for (const { name } of [...old.attributes]) {
    if (name !== "open" && !next.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...next.attributes]) {
    if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  patchChildren(old, [...next.childNodes]);
}

function patchChildren(parent, wanted) {
  const present = [...parent.childNodes];
  wanted.forEach((node, i) => { if (i < present.length) patch(present[i], node); else parent.append(node); });
  present.slice(wanted.length).forEach((node) => node.remove());
}

function show(id, ...children) { patchChildren(document.getElementById(id), children.flat(3).filter(Boolean)); }

// --- numbers for people

const known = (x) => x !== null && x !== undefined;

function bytes(x) {
  if (!known(x)) return null;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  let value = Math.abs(x);
  while (value >= 1024 && i < 4) { value /= 1024; i += 1; }
  return `${x < 0 ? "−" : ""}${value >= 100 || i === 0 ? Math.round(value) : value.toFixed(1)} ${units[i]}`;
}

const percent = (x) => (known(x) ? `${(100 * x).toFixed(x < 0.1 && x > 0 ? 1 : 0)} %` : null);
const count = (x) => (known(x) ? Math.round(x).toLocaleString("en") : null);

function seconds(x) {
  if (!known(x)) return null;
  if (x < 1) return `${Math.round(x * 1000)} ms`;
  if (x < 100) return `${x < 10 ? x.toFixed(1) : Math.round(x)} s`;
  if (x < 6000) return `${Math.round(x / 60)} min`;
  if (x < 172800) return `${(x / 3600).toFixed(1)} h`;
  return `${Math.round(x / 86400)} d`;
}

function clock(wall) { return known(wall) ? new Date(wall * 1000).toLocaleTimeString() : null; }

function inUnit(rule, x) {
  if (!known(x)) return null;
  switch (UNIT[rule]) {
    case "ratio": return percent(x);
    case "bytes": return bytes(x);
    case "s": return seconds(x);
    case "times": return `${x.toFixed(2)} ×`;
    case "per_min": return `${Number(x.toPrecision(3))} /min`;
    default: return String(Number(x.toPrecision(6)));
  }
}

// --- small pieces

const chip = (level, word) => h("span", { class: `chip ${level}` }, `${SIGN[level] || "?"} ${word || level}`);
const levelOf = (x) => (x in ORDER ? x : "unknown");

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value, hint]) =>
    h("div", { title: hint }, h("dt", {}, name), h("dd", { class: known(value) ? null : "none" }, known(value) ? value : "unknown"))));
}

function table(columns, rows) {
  return h("table", {},
    h("thead", {}, h("tr", {}, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => {
      const [name, kind] = columns[i];
      const none = !known(cell) || cell === "";
      return h("td", { class: [kind, none && "none"].filter(Boolean).join(" ") || null, "data-label": name }, none ? "–" : cell);
    })))));
}

function section(title, ...content) {
  return h("section", {}, h("h2", {}, title), ...content);
}

function bar(segments, total, marks, label, thin) {
  let x = 0;
  const scale = (v) => Math.max(0, Math.min(1000, (1000 * v) / total));
  const rects = segments.map(([part, value, text]) => {
    const width = scale(value);
    const rect = h("rect", { x: x.toFixed(1), y: 0, width: width.toFixed(1), height: 20, fill: `var(--${part})` }, h("title", {}, text));
    x += width;
    return rect;
  });
  const lines = marks.map(([at, text]) =>
    h("rect", { class: "mark", x: Math.min(997, scale(at)).toFixed(1), y: 0, width: 3, height: 20 }, h("title", {}, text)));
  return h("svg", { class: thin ? "bar thin" : "bar", viewBox: "0 0 1000 20", preserveAspectRatio: "none", role: "img", "aria-label": label }, rects, lines);
}

function swatch(part) {
  return h("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, h("rect", { width: 10, height: 10, fill: `var(--${part})` }));
}

function exhaustion(f) {
  if (f.state in EXPECTED) return EXPECTED[f.state];
  const bound = (name) => (f[`${name}_state`] === "never" ? "never" : f[`${name}_state`] === "unknown" ? "?" : seconds(f[`${name}_s`]));
  return `${bound("central")} (${bound("low")} to ${bound("high")}; not before ${bound("floor")})`;
}

function coverage(f) {
  return known(f.coverage_ratio) ? `Of ${f.coverage_count} past intervals ${percent(f.coverage_ratio)} held.` : "Not measured yet how often these intervals hold.";
}

// --- GPUs

function gpuLevel(gpu) {
  if (gpu.state === "ok" && gpu.freshness === "fresh") return "green";
  return gpu.state === "lost" || gpu.state === "missing" || gpu.state === "reset_required" ? "red" : "unknown";
}

function memoryBar(gpu) {
  const m = gpu.memory;
  if (!m) return h("p", { class: "why" }, `Memory unknown: ${gpu.detail.replace(/\.$/, "") || (gpu.freshness === "fresh" ? "not reported" : "no fresh figures")}.`);
  const ledger = gpu.ledger || [
    { part: "reserved", bytes: m.reserved_bytes || 0 }, { part: "used", bytes: m.used_bytes }, { part: "free", bytes: m.free_bytes },
  ];
  const rank = Object.keys(PARTS);
  const parts = ledger.filter((p) => p.bytes > 0).sort((a, b) => rank.indexOf(a.part) - rank.indexOf(b.part));
  const text = (p) => `${PARTS[p.part] || p.part} ${bytes(p.bytes)}`;
  const marks = known(gpu.used_peak_bytes) ? [[gpu.used_peak_bytes + (m.reserved_bytes || 0), `peak ${bytes(gpu.used_peak_bytes)}`]] : [];
  return [
    bar(parts.map((p) => [p.part, p.bytes, text(p)]), m.total_bytes, marks, `Memory: ${parts.map(text).join(", ")}`),
    h("ul", { class: "legend" },
      parts.map((p) => h("li", {}, swatch(p.part), text(p))),
      marks.length ? h("li", {}, `▎${marks[0][1]}`) : null),
  ];
}

function holders(gpu) {
  if (!gpu.holders) return gpu.memory ? h("p", { class: "why" }, "Who holds the memory is not known here.") : null;
  if (!gpu.holders.length) return h("p", { class: "why" }, "No process holds memory here.");
  const rows = [...gpu.holders].sort((a, b) => (b.used_bytes || 0) - (a.used_bytes || 0)).map((p) => [
    h("span", {}, bytes(p.used_bytes) || "?"),
    p.pid,
    p.dead ? chip("yellow", "dead") : p.server || "–",
    h("code", {}, p.command || p.name || "unknown"),
    p.cgroup ? h("code", {}, p.cgroup) : null,
  ]);
  return h("details", { open: gpu.holders.length <= 4 ? "" : null }, h("summary", {}, `Who holds the memory (${gpu.holders.length})`),
    table([["Memory", "num"], ["PID", "num"], ["Server"], ["Process", "long"], ["Cgroup", "long"]], rows));
}

// What the rules say about it: the loud ones, worst first, each as a chip with its name.
function loudChips(rules) {
  return rules.filter((r) => r.level === "red" || r.level === "yellow").sort((a, b) => ORDER[a.level] - ORDER[b.level])
    .map((r) => chip(r.level, r.rule.replace(/_/g, " ")));
}

function gpuCard(gpu, rules) {
  const level = gpuLevel(gpu);
  const word = gpu.state !== "ok" ? gpu.state.replace("_", " ") : gpu.freshness === "fresh" ? "ok" : `${gpu.freshness} figures`;
  const m = gpu.memory;
  const title = `GPU ${gpu.index}${gpu.mig_profile ? ` · MIG ${gpu.mig_profile}` : ""} · ${gpu.name || "unknown model"}`;
  return h("article", { class: "card" },
    h("header", {}, h("h3", {}, title), chip(level, word), gpu.phase === "starting" ? chip("unknown", "starting") : null,
      loudChips(rules.filter((r) => r.uuid === gpu.uuid))),
    h("p", { class: "sub" }, [gpu.uuid, gpu.driver_version && `driver ${gpu.driver_version}`, known(gpu.age_s) ? `${seconds(gpu.age_s)} old` : "never seen",
      gpu.phase_detail].filter(Boolean).join(" · ")),
    gpu.detail && m ? h("p", { class: "why" }, gpu.detail) : null,
    gpu.is_mig_parent ? h("p", { class: "why" }, "Split into MIG instances: do not add these figures to theirs.") : null,
    memoryBar(gpu),
    m ? facts([
      ["Used", `${bytes(m.used_bytes)} of ${bytes(m.total_bytes)}`],
      ["Free", bytes(m.free_bytes)],
      ["Lowest free", bytes(gpu.free_low_bytes), "over the peak window"],
      ["Peak use", bytes(gpu.used_peak_bytes), "over the peak window"],
      ["A 15 s reader misses", bytes(gpu.hidden_from_15s_bytes), "how far the true peak of 15 s lies above what a reader of last values sees"],
      ["Headroom", known(gpu.headroom_bytes) ? `${bytes(gpu.headroom_bytes)}${gpu.headroom_falling ? ", falling" : ""}` : null, "free, and what the allocator could return"],
      ["Full in", exhaustion(gpu.forecast), coverage(gpu.forecast)],
      ["Busy", percent(gpu.utilization_ratio)],
      ["Memory bandwidth busy", percent(gpu.memory_bandwidth_utilization_ratio)],
      ["Power, temperature", known(gpu.power_watts) || known(gpu.temperature_celsius)
        ? `${known(gpu.power_watts) ? `${Math.round(gpu.power_watts)} W` : "?"}, ${known(gpu.temperature_celsius) ? `${Math.round(gpu.temperature_celsius)} °C` : "?"}` : null],
      gpu.xid_events.length ? ["Xid events", gpu.xid_events.map((x) => `${x.xid}: ${x.count}`).join(", ")] : null,
      gpu.ecc_uncorrected_total ? ["ECC uncorrected", count(gpu.ecc_uncorrected_total)] : null,
    ]) : null,
    holders(gpu));
}

// --- servers

const EVICTABLE = { free: "cached blocks count as free", used: "cached blocks count as used", unknown: "whether cached blocks count is unknown" };
const BASIS = { occupancy: "blocks in use", reservation: "worst-case reservations", slots: "slots in use" };

function latencies(engine, slo) {
  const rows = [["First token", engine.ttft], ["Per token", engine.tpot], ["Queue", engine.queue]].map(([name, q]) =>
    q.state === "known" ? [name, seconds(q.p50_s), seconds(q.p95_s), `${q.beyond ? "≥ " : ""}${seconds(q.p99_s)}`, count(q.count)]
      : [name, q.state === "empty" ? "no requests" : "unknown", null, null, null]);
  return [
    h("h4", {}, "Latency over 60 s", slo && known(slo.value) ? ` · ${slo.value.toFixed(2)} × its objective ` : "", slo ? chip(levelOf(slo.level)) : null),
    table([["", "wide"], ["p50", "num"], ["p95", "num"], ["p99", "num"], ["Requests", "num"]], rows),
  ];
}

function engineBlock(server, engine, rules) {
  const mine = rules.filter((r) => r.server === server.server && r.engine === engine.engine);
  const slo = mine.find((r) => r.rule === "latency_slo");
  const usage = engine.kv_usage_ratio;
  const title = server.engines.length > 1 ? `Engine ${engine.engine} · KV cache` : "KV cache";
  const label = known(usage) ? `KV cache ${percent(usage)} in use` : "KV usage unknown";
  return h("section", {},
    h("h4", {}, title, known(usage) ? ` · ${percent(usage)} ` : " · usage unknown ", loudChips(mine)),
    known(usage) ? bar([["kv_used", usage, label]], 1, [], label, true) : null,
    facts([
      ["Running, waiting", known(engine.running) || known(engine.waiting) ? `${count(engine.running) ?? "?"}, ${count(engine.waiting) ?? "?"}${engine.waiting_rising && engine.waiting > 0 ? ", rising" : ""}` : null],
      ["Time lost to recompute", percent(engine.recompute_tax_ratio), "share of engine time, estimated over 60 s"],
      ["Tokens recomputed", percent(engine.recomputed_tokens_ratio)],
      ["Preemptions", known(engine.preemptions_per_s) ? `${engine.preemptions_per_s.toFixed(1)} /s` : null],
      ["KV full in", exhaustion(engine.forecast), coverage(engine.forecast)],
      ["Blocks", known(engine.kv.num_blocks) ? `${count(engine.kv.num_blocks)} × ${engine.kv.block_size_tokens ?? "?"} tokens` : null],
      ["Demand", percent(engine.demand_ratio), "used and waiting, as a share of the pool"],
      ["Block waste", engine.waste ? `${percent(engine.waste.ratio)} (${engine.waste.method})` : null],
      ["Tokens in, out", known(engine.generation_tokens_per_s) ? `${count(engine.prompt_tokens_per_s) ?? "?"}, ${count(engine.generation_tokens_per_s)} /s` : null],
    ]),
    latencies(engine, slo));
}

function serverCard(server, rules) {
  const level = server.state === "down" ? "red" : server.state === "stale" ? "unknown" : server.stalled ? "red" : "green";
  const s = server.semantics;
  return h("article", { class: "card" },
    h("header", {}, h("h3", {}, `${server.server} · ${server.kind}${server.version ? ` ${server.version}` : ""}`),
      chip(level, server.stalled ? "stalled" : server.state), server.phase === "starting" ? chip("unknown", "starting") : null,
      loudChips(rules.filter((r) => r.server === server.server && !r.engine))),
    h("p", { class: "sub" }, [server.model, server.url, known(server.age_s) ? `${seconds(server.age_s)} old` : "never seen", server.phase_detail].filter(Boolean).join(" · ")),
    server.state === "down" ? h("p", { class: "why" }, [
      known(server.down_for_s) ? `Down for ${seconds(server.down_for_s)}.` : "Down.",
      server.memory_held_while_down_bytes ? ` Its processes still hold ${bytes(server.memory_held_while_down_bytes)}.` : ""]) : null,
    s ? h("p", { class: "why" }, `KV usage here means: ${s.note || `${BASIS[s.basis] || s.basis}; ${EVICTABLE[s.evictable] || s.evictable}`}.`) : null,
    server.engines.map((engine) => engineBlock(server, engine, rules)));
}

// --- the rest

function where(r) {
  if (r.server) return r.engine ? `${r.server}/${r.engine}` : r.server;
  if (r.uuid) return r.gpu === "" || r.gpu === undefined ? r.uuid : `GPU ${r.gpu}${r.uuid.startsWith("MIG") ? " (MIG)" : ""}`;
  return r.source || "this host";
}

// Where what was kept of the minutes before a paging rule's red is shown.
function evidenceLink(r) {
  const query = new URLSearchParams({ rule: r.rule, server: r.server, engine: r.engine, uuid: r.uuid });
  return h("a", { href: `/evidence/latest?${query}` }, "evidence");
}

function ruleTable(rules, now) {
  return table(
    [["Level"], ["Rule"], ["Where"], ["Value", "num"], ["Yellow", "num"], ["Red", "num"], ["For", "num"], ["Why", "wide"]],
    rules.map((r) => [
      chip(levelOf(r.level)), r.rule, where(r), inUnit(r.rule, r.value), inUnit(r.rule, r.yellow), inUnit(r.rule, r.red),
      known(r.since_wall_s) ? seconds(Math.max(0, now - r.since_wall_s)) : null,
      h("span", {}, r.detail || REASON[r.reason] || r.reason.replace(/_/g, " "), r.pages ? "" : " (does not page)",
        r.pages && r.level === "red" ? [" · ", evidenceLink(r)] : null),
    ]));
}

function ruleSection(state) {
  const rules = [...state.rules].sort((a, b) => ORDER[levelOf(a.level)] - ORDER[levelOf(b.level)]);
  const loud = rules.filter((r) => r.level === "red" || r.level === "yellow");
  const calm = rules.filter((r) => r.level !== "red" && r.level !== "yellow");
  const tally = ["unknown", "green"].map((l) => `${calm.filter((r) => levelOf(r.level) === l).length} ${l}`).join(", ");
  return section("Rules", h("div", { class: "card" },
    loud.length ? ruleTable(loud, state.wall_s) : h("p", { class: "why" }, "No rule is yellow or red."),
    calm.length ? h("details", {}, h("summary", {}, `The others: ${tally}`), ruleTable(calm, state.wall_s)) : null));
}

function limitText(limit) {
  if (!limit) return "no limit";
  return [limit.admit ? null : "admits no new request", known(limit.max_running) ? `at most ${limit.max_running} running` : null].filter(Boolean).join(", ") || "no limit";
}

function limitSection(state) {
  if (!state.limits.length) return null;
  return section("Limits", h("div", { class: "card" }, h("ul", { class: "plain" }, state.limits.map((l) => h("li", {},
    h("b", {}, l.server), ` (own limit ${known(l.configured) ? l.configured : "not told"}): `,
    l.state === "active" ? `${limitText(l.active)}, ends ${clock(l.expires_wall_s) || "by itself"} unless renewed`
      : l.state === "advised" ? `would impose: ${limitText(l.would_be)}` : "nothing imposed",
    l.imposed_by ? ` · ${l.imposed_by}` : "", l.reason ? ` · ${l.reason}` : "")))));
}

function sourceSection(state) {
  const word = { up: "green", down: "red", stuck: "red", paused: "unknown" };
  return section("Sources", h("div", { class: "card" }, table(
    [["State"], ["Source"], ["Last good", "num"], ["Took", "num"], ["Errors", "num"], ["Why", "wide"]],
    state.sources.map((s) => [chip(word[s.state] || "unknown", s.state), s.source, known(s.age_s) ? `${seconds(s.age_s)} ago` : "never",
      seconds(s.took_s), count(s.errors_total), s.failure ? s.failure.message : null]))));
}

function unknownSection(state) {
  return section("What is not known, and why", h("div", { class: "card" }, state.unknown.length
    ? h("ul", { class: "plain" }, state.unknown.map((u) => h("li", {}, h("b", {}, u.what), `: ${u.why}`)))
    : h("p", { class: "why" }, "Everything that is watched is known.")));
}

function eventSection(events) {
  return section("Last events", h("div", { class: "card" }, events.length
    ? h("ul", { class: "plain" }, [...events].reverse().map((e) => h("li", {},
      h("time", { datetime: new Date(e.wall_s * 1000).toISOString() }, clock(e.wall_s)),
      e.level_to ? chip(levelOf(e.level_to)) : h("span", { class: "chip unknown" }, e.kind), ` ${e.message}`,
      e.fields && e.fields.evidence ? [" · ", h("a", { href: `/evidence/${encodeURIComponent(e.fields.evidence)}` }, "evidence")] : null)))
    : h("p", { class: "why" }, "Nothing has changed yet.")));
}

// --- polling

const seen = { state: null, tick: null, changed: Date.now(), events: new Map(), since: null, error: "" };

function notices() {
  const s = seen.state;
  const lines = [];
  if (seen.error) lines.push(`No answer from kvwatch (${seen.error}); the page shows its last report.`);
  else if (s && Date.now() - seen.changed > Math.max(5000, 3000 * s.period_s)) lines.push("kvwatch answers, but its loop has stopped; the figures are old.");
  if (s && s.maintenance.active) lines.push(`In maintenance until ${clock(s.maintenance.until_wall_s)}: the GPUs are released.`);
  if (s && !s.config.last_reload_successful) lines.push(`The changed configuration is not in use: ${s.config.error || "see the log"}`);
  if (s && s.demo) lines.push(`A demonstration (${s.demo}): everything here is simulated.`);
  return lines.map((line) => h("p", { class: "notice" }, line));
}

function draw() {
  const s = seen.state;
  const warnings = notices();
  show("notices", warnings);
  document.getElementById("body").className = seen.error ? "old" : "";
  if (!s) return;
  const level = levelOf(s.headline.level);
  document.title = `${level} · kvwatch`;
  show("about", [`${s.version} · ${s.mode} · report of ${clock(s.wall_s)}`]
    .map((text) => document.createTextNode(text)));
  const sentence = s.headline.detail || { red: "A paging rule is red.", yellow: "A rule is yellow.", green: "No paging rule is raised.", unknown: "Not enough is known yet." }[level];
  show("headline", h("p", { class: `headline ${level}` }, h("span", { class: "word" }, `${SIGN[level]} ${level}`), h("span", {}, sentence.replace(`${level}: `, ""))));
  show("body",
    s.servers.length ? section("Servers", h("div", { class: "cards" }, s.servers.map((server) => serverCard(server, s.rules)))) : null,
    section("GPUs", s.gpus.length ? h("div", { class: "cards" }, s.gpus.map((gpu) => gpuCard(gpu, s.rules))) : h("p", { class: "why" }, "No GPU is visible here; the sources below say why.")),
    ruleSection(s), limitSection(s), unknownSection(s), sourceSection(s),
    eventSection([...seen.events.values()]));
}

async function fetchJson(url) {
  const answer = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(answer.status === 503 ? "it is starting" : `status ${answer.status}`);
  return answer.json();
}

async function fetchEvents(now) {
  const since = seen.since === null ? now - 86400 : seen.since;
  const { events } = await fetchJson(`/api/v1/events?since=${since}`);
  for (const event of events) {
    seen.events.set(event.seq, event);
    seen.since = event.wall_s;
  }
  const surplus = seen.events.size - KEPT_EVENTS;
  [...seen.events.keys()].slice(0, Math.max(0, surplus)).forEach((seq) => seen.events.delete(seq));
}

async function poll() {
  try {
    const state = await fetchJson("/api/v1/state");
    if (state.tick !== seen.tick) { seen.tick = state.tick; seen.changed = Date.now(); }
    seen.state = state;
    await fetchEvents(state.wall_s);
    seen.error = "";
  } catch (error) {
    seen.error = error.message || "unreachable";
  }
  draw();
}

async function run() {
  if (!document.hidden) await poll();
  setTimeout(run, POLL_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
run();
