// Computes the displayed figures from responses of /api. Nothing here uses the DOM: tests run this file without a page.

export const NUM_SLOTS = 360; // an hour, which is as much as routers keep
const SMALLEST_PART_S = 3; // minimum part of the current slot: less is not enough for a rate

// Replaces known slots by those of a response of /api/history. kept: slot -> {num_routers, counts}.
export function remember(kept, answer) {
  const slots = new Map(kept);
  for (const { slot, num_routers, counts } of answer.slots) slots.set(slot, { num_routers, counts });
  const oldest = Math.floor(answer.now_s / answer.slot_s) - NUM_SLOTS + 1;
  return new Map([...slots].filter(([slot]) => slot >= oldest).sort((a, b) => a[0] - b[0]));
}

export function added(slots) {
  const sums = {};
  for (const { counts } of slots) for (const [name, count] of Object.entries(counts)) sums[name] = (sums[name] || 0) + count;
  return sums;
}

// Returns [[name without the prefix, count]] of names such as requests/met/default.
function below(counts, prefix) {
  return Object.entries(counts).filter(([name]) => name.startsWith(prefix)).map(([name, count]) => [name.slice(prefix.length), count]);
}

const sumBelow = (counts, prefix) => below(counts, prefix).reduce((sum, [, count]) => sum + count, 0);

// Returns the requests by class and outcome: {default: {met: 3}}.
export function byClass(counts) {
  const classes = {};
  for (const [name, count] of below(counts, "requests/")) {
    const cut = name.indexOf("/");
    (classes[name.slice(cut + 1)] ||= {})[name.slice(0, cut)] = count;
  }
  return classes;
}

// Counts requests: offered, met, late, failed, refused. Cancelled requests count only as offered.
export function requests(counts) {
  const of = (outcome) => sumBelow(counts, `requests/${outcome}/`);
  const met = of("met"), refused = of("rejected"), errors = of("error"), cancelled = of("cancelled");
  const offered = sumBelow(counts, "requests/");
  return { offered, met, refused, errors, cancelled, late: offered - met - refused - errors - cancelled, ended: offered - cancelled };
}

// Returns {value, isAbove, isBelow}, interpolated within a bucket like Prometheus' histogram_quantile. isBelow: the quantile
// is below the first bound, which is then the value. isAbove: it is above the last finite bound, which is then the value.
// null: nothing was measured. Slots contain only buckets that are not empty; bounds has the ends of all buckets, by prefix
// (ttft, itl or duration).
export function quantile(q, counts, prefix, bounds) {
  const number = (bound) => (bound === "+Inf" ? Infinity : Number(bound));
  const buckets = below(counts, prefix + "/").map(([bound, count]) => [number(bound), count]).sort((a, b) => a[0] - b[0]);
  const all = buckets.reduce((sum, [, count]) => sum + count, 0);
  if (!(all > 0)) return null;
  const rank = q * all, ends = bounds[prefix.startsWith("ttft_of/") ? "ttft" : prefix] || [];
  let seen = 0;
  for (const [end, count] of buckets) {
    if (end === Infinity) break;
    const begin = Math.max(0, ...ends.filter((each) => each < end));
    if (seen + count >= rank) {
      if (begin === 0) return { value: end, isAbove: false, isBelow: true };
      return { value: begin + ((end - begin) * (rank - seen)) / count, isAbove: false, isBelow: false };
    }
    seen += count;
  }
  return { value: Math.max(0, ...ends), isAbove: true, isBelow: false };
}

// Returns the classes of prompts by their number of uncached tokens: [{id, name}], shortest first.
export function promptClasses(bounds) {
  const ends = bounds.ttft_of || [], number = (value) => figure(value, 0);
  const between = ends.map((end, i) => ({ id: String(end), name: i ? `${number(ends[i - 1] + 1)} to ${number(end)}` : `up to ${number(end)}` }));
  return ends.length ? [...between, { id: "+Inf", name: `above ${number(ends.at(-1))}` }] : [];
}

// Sums the slots from `nowS - spanS` to now in periods of `stepS`: [{at, forS, counts} or {at, counts: null}].
export function stretches(slots, { nowS, slotS, spanS, stepS }) {
  const now = Math.floor(nowS / slotS), per = Math.max(1, Math.round(stepS / slotS));
  const first = Math.floor((now - spanS / slotS + 1) / per) * per;
  const found = [];
  for (let begin = first; begin <= now; begin += per) {
    const numbers = Array.from({ length: per }, (_, i) => begin + i).filter((slot) => slot <= now);
    const known = numbers.filter((slot) => slots.has(slot));
    const forS = known.length * slotS - (known.includes(now) ? (now + 1) * slotS - nowS : 0);
    const at = Math.min((begin + per) * slotS, nowS);
    if (begin + per > now && forS < SMALLEST_PART_S && found.length) continue;
    found.push({ at, forS, counts: known.length && forS > 0 ? added(known.map((slot) => slots.get(slot))) : null });
  }
  return found;
}

const STEPS_S = { 300: 10, 900: 30, 3600: 60 };
const share = (part, whole) => (whole > 0 ? part / whole : null);

// Returns all figures of the overview about requests; unknown ones are null. prompts: the class of prompts for the lines of
// first tokens; empty: all.
export function overview(slots, { nowS, slotS, spanS, bounds, prompts = "" }) {
  const parts = stretches(slots, { nowS, slotS, spanS, stepS: STEPS_S[spanS] || 60 });
  const known = parts.filter((part) => part.counts);
  const counts = added(known), seconds = known.reduce((sum, part) => sum + part.forS, 0);
  const rate = (count, forS) => (forS > 0 ? count / forS : null);
  const line = (value) => parts.map((part) => (part.counts ? value(part) : null));
  const perS = (of) => line((part) => rate(of(part.counts), part.forS));
  const latency = (prefix, q) => line((part) => quantile(q, part.counts, prefix, bounds)?.value ?? null);
  const recent = stretches(slots, { nowS, slotS, spanS: 3 * slotS, stepS: 3 * slotS }).filter((part) => part.counts).at(-1);
  const recentOf = (name) => (recent ? rate(recent.counts[name] || 0, recent.forS) : null);
  const quantiles = (prefix) => ({ p50: quantile(0.5, counts, prefix, bounds), p99: quantile(0.99, counts, prefix, bounds) });
  const first = prompts ? `ttft_of/${prompts}` : "ttft";
  const total = requests(counts), prompt = counts.prompt_tokens || 0;
  const misses = below(counts, "misses/").sort((a, b) => b[1] - a[1]);
  const blamed = misses.reduce((sum, [, count]) => sum + count, 0);
  return {
    seconds, total,
    attainment: share(total.met, total.ended),
    goodput: rate(total.met, seconds), offered: rate(total.offered, seconds),
    ttft: quantiles("ttft"),
    first: quantiles(first),
    lengths: promptClasses(bounds).map((each) => ({ ...each, count: sumBelow(counts, `ttft_of/${each.id}/`), ...quantiles(`ttft_of/${each.id}`) })),
    itl: quantiles("itl"),
    duration: quantiles("duration"),
    hits: share(counts.cached_tokens || 0, prompt), ceiling: share(counts.seen_tokens || 0, prompt),
    tokens: { prompt, generated: counts.generated_tokens || 0 },
    misses: misses.map(([stage, count]) => ({ stage, count, share: count / blamed })),
    classes: Object.entries(byClass(counts)).sort().map(([name, outcomes]) => {
      const { met = 0, cancelled = 0, ...others } = outcomes;
      const ended = met + Object.values(others).reduce((sum, count) => sum + count, 0);
      return { name, ended, attainment: share(met, ended), perS: rate(met, seconds), others: cancelled ? { ...others, cancelled } : others };
    }),
    now: { promptPerS: recentOf("prompt_tokens"), kvPerS: recentOf("kv_bytes"), generatedPerS: recentOf("generated_tokens"),
      requestsPerS: recent ? rate(requests(recent.counts).offered, recent.forS) : null },
    lines: {
      at: parts.map((part) => part.at),
      offered: perS((each) => requests(each).offered), met: perS((each) => requests(each).met),
      refused: perS((each) => requests(each).refused),
      ttftP50: latency(first, 0.5), ttftP99: latency(first, 0.99), itlP50: latency("itl", 0.5), itlP99: latency("itl", 0.99),
      prompt: perS((each) => each.prompt_tokens || 0), generated: perS((each) => each.generated_tokens || 0),
    },
  };
}

// Identifies a worker: workers of different models may have the same id.
export const workerKey = (worker) => (worker.release ? `${worker.release}/${worker.id}` : worker.id);

const isShared = (model, models) => models.filter((each) => each.id === model.id).length > 1;
const nameOf = (model, models) => (!isShared(model, models) ? model.id : model.release.startsWith(model.id) ? model.release : `${model.id} · ${model.release}`);

// Returns the models to choose from, by name: [{release, name}]. The name has the release if several have the model's name.
export function modelNames(models) {
  return models.map((each) => ({ release: each.release, name: nameOf(each, models) })).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

// Returns the release that an alert is about; empty: it is about no single model.
function releaseOf(alert, models) {
  const found = models.map((each) => each.release).filter((release) => alert.about === release || alert.about.startsWith(`${release}/`));
  return found.sort((a, b) => b.length - a.length)[0] || "";
}

// Returns the part of a response of /api/status that concerns one model; the whole status if release is empty.
export function ofModel(status, release) {
  const model = status.models.find((each) => each.release === release);
  if (!release || !model) return status;
  const none = { met: 0, missed: 0, rejected: 0 };
  return {
    ...status, models: [model], pools: model.pools, controller: model.controller,
    not_ready: model.state === "down" ? status.not_ready || "no decode worker is ready" : status.not_ready,
    workers: status.workers.filter((each) => each.release === release),
    routers: status.routers.map((router) => ({ ...router, ...none, ...router.models.find((each) => each.content_id === model.content_id) })),
    alerts: status.alerts.filter((each) => ["", release].includes(releaseOf(each, status.models))),
  };
}

const STATES = { ready: "good", asleep: "soft", waking: "warn", down: "bad", leaving: "soft" };

// Returns the texts of each model: [{release, name, state, level, facts, canWake}]. all: all models of the endpoint.
export function modelLines(models, all) {
  return models.map((model) => {
    const { state, pools, held, wake_s, problem } = model, shares = all.filter((each) => each.id === model.id && each.state !== "leaving");
    const workers = Object.entries(pools).sort().reverse().filter(([, pool]) => pool.desired || pool.ready).map(([name, pool]) => `${name} ${pool.ready} of ${pool.desired}`);
    return {
      release: model.release, name: nameOf(model, all), state, level: STATES[state] || "soft", canWake: state === "asleep",
      facts: [
        isShared(model, all) && state !== "leaving" ? `${percent(share(model.share, shares.reduce((sum, each) => sum + each.share, 0)))} of the sessions` : "",
        workers.length ? workers.join(", ") : "no workers",
        held ? `${figure(held, 0)} ${held === 1 ? "request" : "requests"} held` : "",
        wake_s > 0 ? `woke in ${duration(wake_s)} last time` : "",
        problem ? `does not wake: ${problem}` : "",
      ].filter(Boolean),
    };
  }).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

// Whether the models need a list of their own: there are several, or the only one does not simply serve.
export const isListed = (models) => models.length > 1 || models.some((each) => ["asleep", "waking", "leaving"].includes(each.state));

// Returns the pools of each model: [{key, release, name, title, text, pool, wanted}]. wanted: by the autoscaler; undefined: it is off.
export function poolLines(models) {
  return models.flatMap((model) => Object.entries(model.pools).sort().reverse().map(([name, pool]) => ({
    key: `${model.release}/${name}`, release: model.release, name, pool,
    title: models.length > 1 ? `${nameOf(model, models)}: ${name} pool` : `${title(name)} pool`,
    text: models.length > 1 ? `${name} pool of ${nameOf(model, models)}` : `${name} pool`,
    wanted: model.controller?.scaling.find((each) => each.pool === name)?.wanted,
  })));
}

// Returns the component that stands for the models and their pools where there are several.
function modelsPart(models) {
  const states = {}, lacking = [];
  for (const model of models) {
    states[model.state] = (states[model.state] || 0) + 1;
    const name = nameOf(model, models), short = Object.entries(model.pools).find(([, pool]) => pool.ready < pool.desired);
    if (model.state === "down") lacking.push(`${name} is down`);
    else if (model.state === "ready" && short) lacking.push(`${name}: ${short[0]} ${short[1].ready} of ${short[1].desired}`);
    else if (!model.controller) lacking.push(`${name} has no controller`);
  }
  const value = Object.keys(STATES).filter((state) => states[state]).map((state) => `${states[state]} ${state}`).join(", ");
  return { name: "Models", level: states.down ? "bad" : lacking.length ? "warn" : "good", value, more: lacking.join("; ") };
}

// Returns the components of the cluster with their health: [{name, level: good|warn|bad, value, more}].
export function parts(status) {
  const found = [];
  const ready = status.not_ready === "";
  const versions = new Set([status.version, ...status.routers.map((r) => r.version), ...status.workers.map((w) => w.version)].filter(Boolean));
  found.push({ name: "Requests", level: ready ? "good" : "bad", value: ready ? "served" : "not served", more: status.not_ready });
  found.push({ name: "Routers", level: "good", value: String(status.routers.length), more: "" });
  const isSeveral = status.models.length > 1;
  if (isSeveral) found.push(modelsPart(status.models));
  for (const [name, pool] of isSeveral ? [] : Object.entries(status.pools).sort().reverse()) {
    const level = pool.ready >= pool.desired ? "good" : pool.ready > 0 ? "warn" : "bad";
    found.push({ name: title(name), level, value: `${pool.ready} of ${pool.desired}`, more: "ready" });
  }
  const sick = status.workers.filter((w) => w.self_check !== "ok");
  if (sick.length) found.push({ name: "Self-check", level: "bad", value: "failed", more: sick.map((w) => `${w.id} (${w.role}): ${w.self_check}`).join("; ") });
  found.push({ name: "Redis", level: status.redis.ok ? "good" : "bad", value: status.redis.ok ? "answers" : "lost", more: status.redis.ok ? "" : "served from memory" });
  if (!isSeveral) found.push(status.controller
    ? { name: "Controller", level: "good", value: "answers", more: "" }
    : { name: "Controller", level: "warn", value: "none", more: "pools stay as they are" });
  found.push(versions.size > 1
    ? { name: "Versions", level: "warn", value: String(versions.size), more: [...versions].sort().join(", ") }
    : { name: "Version", level: "good", value: status.version, more: "" });
  return found;
}

// Returns the cluster's health in one line: the components and firing alerts of the worst level.
export function health(found, alerts = []) {
  const firing = alerts.filter((each) => each.is_firing).map((each) => ({ level: levelOf(each), text: each.name }));
  const named = (part) => ({ level: part.level, text: `${part.name.toLowerCase()} ${part.value}` });
  const all = [...found.map(named), ...firing], worst = ["bad", "warn"].find((level) => all.some((each) => each.level === level));
  if (!worst) return { level: "good", text: "all components healthy" };
  return { level: worst, text: all.filter((each) => each.level === worst).map((each) => each.text).join(", ") };
}

const levelOf = (alert) => (alert.severity === "critical" ? "bad" : "warn");

// Returns the texts of each alert: [{key, level, word, summary, lasts, page}]. A pending alert shows when it will fire.
export function alertLines(alerts, nowS) {
  return alerts.map((each) => {
    const forS = Math.max(0, nowS - each.since_s), waits = each.is_firing ? "" : `, fires after ${age(each.for_s)}`;
    return {
      key: `${each.name}/${each.about}`, name: each.name, level: each.is_firing ? levelOf(each) : "soft", word: each.is_firing ? each.severity : "pending",
      summary: each.summary, lasts: `for ${age(forS)}${waits}`, page: `docs/runbook/${each.name}.md`,
    };
  });
}

const NEARLY_FULL = 0.8; // share of a router's limit

// Returns the displayed load of a router: [{name, value, level}].
export function loadFigures(load) {
  const of = (name, used, limit) => ({ name, value: limit ? `${figure(used, 0)} of ${figure(limit, 0)}` : figure(used, 0), level: limit && used / limit > NEARLY_FULL ? "warn" : "" });
  return [
    { name: "processor", value: percent(load.cpu_share), level: load.cpu_share > NEARLY_FULL ? "warn" : "" },
    { name: "event loop lag", value: duration(load.loop_lag_s), level: load.loop_lag_s > 0.1 ? "warn" : "" },
    { name: "memory", value: bytes(load.memory_bytes), level: "" },
    of("responses in flight", load.in_flight, load.max_in_flight),
    of("connections", load.connections, load.max_connections),
    of("files", load.open_files, load.max_files),
  ];
}

// Returns the rate per second of a counter of workers or routers, between two responses of /api/status: {workerKey: value}.
export function rates(before, now, list, value) {
  const old = new Map((before?.[list] || []).map((each) => [`${workerKey(each)}/${each.pid}`, value(each)]));
  const forS = before ? now.now_s - before.now_s : 0;
  const found = {};
  for (const each of now[list]) {
    const was = old.get(`${workerKey(each)}/${each.pid}`);
    found[workerKey(each)] = was === undefined || !(forS > 0) ? null : Math.max(0, value(each) - was) / forS;
  }
  return found;
}

export const title = (word) => word.charAt(0).toUpperCase() + word.slice(1).replaceAll("_", " ");
export const figure = (value, digits = 1) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
export const short = (value) => (value === null || value === undefined ? "–" : value >= 1e6 ? figure(value / 1e6) + "M" : value >= 1e4 ? figure(value / 1e3) + "k"
  : figure(value, value >= 100 || value === 0 ? 0 : value >= 1 ? 1 : 2));
export const percent = (value) => (value === null || value === undefined ? "–" : figure(100 * value, value > 0.995 && value < 1 ? 1 : 0) + " %");
export const duration = (s) =>
  s === null || s === undefined ? "–" : s === 0 ? "0 ms" : s < 0.00995 ? figure(1000 * s, 1) + " ms" : s < 0.9995 ? figure(1000 * s, 0) + " ms"
    : figure(s, s < 9.995 ? 2 : s < 99.95 ? 1 : 0) + " s";
export const tick = (s) => (s < 1 ? `${+(1000 * s).toPrecision(2)} ms` : s < 120 ? `${+s.toPrecision(3)} s` : `${+(s / 60).toPrecision(3)} min`);
export const rateOfBytes = (perS) => (perS === null ? "–" : perS >= 2 ** 30 ? figure(perS / 2 ** 30, 2) + " GiB/s"
  : perS >= 2 ** 20 ? figure(perS / 2 ** 20, 1) + " MiB/s" : figure(perS / 2 ** 10, perS < 10240 && perS > 0 ? 1 : 0) + " KiB/s");
export const bytes = (value) => (value >= 2 ** 30 ? figure(value / 2 ** 30, 2) + " GiB" : figure(value / 2 ** 20, 0) + " MiB");
export function age(s) {
  if (!(s >= 0)) return "–";
  const steps = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [i, [length, name]] of steps.entries()) {
    if (s >= length) {
      const rest = Math.floor((s % length) / (steps[i + 1]?.[0] || 1));
      return `${Math.floor(s / length)} ${name}` + (rest && steps[i + 1] ? ` ${rest} ${steps[i + 1][1]}` : "");
    }
  }
  return `${Math.floor(s)} s`;
}
export function latencyText(found) {
  if (!found) return "–";
  if (found.isAbove) return `> ${tick(found.value)}`;
  return found.isBelow ? `< ${duration(found.value)}` : duration(found.value);
}

// Returns the indices of values without a neighbour. A line needs two values, so these are drawn as points.
export function lone(values) {
  const lacks = (value) => value === null || value === undefined;
  return values.flatMap((value, i) => (!lacks(value) && lacks(values[i - 1]) && lacks(values[i + 1]) ? [i] : []));
}
