
"use strict";

// ---- small helpers ------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const KEY = "octavo-key";
const POLL_MS = 1000, HISTORY_S = 120, WINDOW_S = 60;

/** An element with classes and text; text is never read as HTML. */
function element(tag, classes = "", text = "") {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text !== "") made.textContent = text;
  return made;
}

function show(id, text) {
  const target = byId(id);
  if (target.textContent !== text) target.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function rateText(value) {
  return value >= 100 ? whole.format(value) : tenth.format(value);
}

function secondsText(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value < 0.001) return `${whole.format(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${whole.format(value * 1e3)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${whole.format(value / 60)} min`;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// ---- talking to the server ----------------------------------------------------------------------

let keyDialogOpen = false;

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** fetch, asking for a key where one is wanted. Paths are relative, so that a prefix is kept. */
async function ask(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers) });
  if (answer.status === 401) askForKey();
  return answer;
}

async function errorText(answer) {
  try {
    const body = await answer.json();
    if (body.error && body.error.message) return body.error.message;
  } catch { /* not JSON */ }
  return `the server answered ${answer.status}`;
}

function askForKey() {
  if (keyDialogOpen) return;
  byId("key-error").hidden = sessionStorage.getItem(KEY) === null;
  sessionStorage.removeItem(KEY);
  keyDialogOpen = true;
  byId("key").value = "";
  byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!key) return;
  if (!/^[\x21-\x7e]+$/.test(key)) {
    byId("key-error").hidden = false;
    return;
  }
  sessionStorage.setItem(KEY, key);
  keyDialogOpen = false;
  byId("key-dialog").close();
  poll();
});
byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

// ---- polling ------------------------------------------------------------------------------------

let timer = null, polling = false, seen = null;
const samples = [];

async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden || keyDialogOpen) return;
  polling = true;
  let wait = POLL_MS;
  try {
    const answer = await ask("dashboard/data", { signal: AbortSignal.timeout(8000) });
    if (answer.ok) take(await answer.json());
    else if (answer.status !== 401) unreachable(await errorText(answer));
  } catch {
    unreachable("The server does not answer.");
    wait = 2 * POLL_MS;
  } finally {
    polling = false;
  }
  if (!document.hidden && !keyDialogOpen) timer = setTimeout(poll, wait);
}
document.addEventListener("visibilitychange", poll);

function unreachable(text) {
  state("unreachable", "bad", text);
}

function state(word, kind, problem) {
  show("state", word);
  byId("state").className = `state ${kind}`;
  byId("problem").hidden = !problem;
  show("problem", problem || "");
}

function take(data) {
  seen = data;
  const last = samples.at(-1);
  // Another API process may answer; totals that fall mean that the server was started anew.
  if (last && data.numbers.prompt_tokens < last.numbers.prompt_tokens) samples.length = 0;
  samples.push({ at: data.at, numbers: data.numbers, histograms: data.histograms });
  while (samples.length > 2 && samples[0].at < data.at - HISTORY_S) samples.shift();
  if (data.ready) state("ready", "good", "");
  else if (/loading/.test(data.problem)) state("loading", "", "");
  else state("not ready", "bad", data.problem);
  drawFacts(data);
  drawNumbers(data);
  drawBlocks(data);
  drawPhases(data);
  drawRequests(data);
}

/** The sample about so many seconds old, or the oldest. */
function earlier(seconds) {
  const limit = seen.at - seconds;
  return samples.findLast((sample) => sample.at <= limit) || samples[0];
}

/** How a counter grew each second, over the last few seconds. */
function rate(name, now, before) {
  const seconds = now.at - before.at;
  return seconds > 0 ? Math.max(0, now.numbers[name] - before.numbers[name]) / seconds : 0;
}

/** Mean of a histogram since an earlier sample, else since the start. */
function mean(name, now, before) {
  const a = before.histograms[name], b = now.histograms[name];
  const count = sum(b.counts) - sum(a.counts);
  if (count > 0) return { value: (b.sum - a.sum) / count, what: "mean of the last minute" };
  const all = sum(b.counts);
  if (all > 0) return { value: b.sum / all, what: "mean since the start" };
  return { value: null, what: "no request yet" };
}

// ---- numbers and charts -------------------------------------------------------------------------

function drawFacts(data) {
  show("model", data.models[0]);
  const parts = data.parts || {};
  const facts = [
    data.device && `${data.device}, ${data.dtype}`,
    data.max_model_len && `${whole.format(data.max_model_len)} tokens of context`,
    parts.scheduler_policy, parts.kv_cache_manager, parts.attention_backend,
    `Octavo ${data.version}`,
  ];
  show("facts", facts.filter(Boolean).join(" · "));
  document.title = `${data.models[0]} · Octavo`;
  if (data.max_model_len) byId("max-tokens").max = data.max_model_len;
}

function drawNumbers(data) {
  const now = samples.at(-1), before = earlier(3), minute = earlier(WINDOW_S);
  const numbers = data.numbers;
  show("tps", rateText(rate("generation_tokens", now, before)));
  show("prompt-tps", rateText(rate("prompt_tokens", now, before)));
  const first = mean("time_to_first_token_seconds", now, minute);
  const between = mean("inter_token_latency_seconds", now, minute);
  show("ttft", secondsText(first.value));
  show("ttft-sub", first.what);
  show("itl", secondsText(between.value));
  show("itl-sub", between.what);
  show("running", whole.format(numbers.num_requests_running));
  show("waiting", whole.format(numbers.num_requests_waiting));
  const swapped = numbers.num_requests_swapped;
  show("swapped", swapped ? `, ${whole.format(swapped)} of them swapped out` : "");
  const ends = numbers.request_success;
  show("answered", whole.format(ends.stop + ends.length));
  show("aborted", whole.format(ends.abort));
  show("failed", whole.format(ends.error));
  show("refused", whole.format(sum(Object.values(numbers.admission_rejections))));
  show("preemptions", whole.format(numbers.num_preemptions));
  const asked = numbers.prefix_cache_queries;
  show("hits", asked ? `${tenth.format(100 * numbers.prefix_cache_hits / asked)} %` : "–");
  chart("tps-chart", series((a, b) => rate("generation_tokens", b, a)));
  chart("ttft-chart", series((a, b) => gained("time_to_first_token_seconds", a, b)));
  chart("itl-chart", series((a, b) => gained("inter_token_latency_seconds", a, b)));
  chart("running-chart", series((a, b) => b.numbers.num_requests_running),
    series((a, b) => b.numbers.num_requests_running + b.numbers.num_requests_waiting));
}

/** Mean of what a histogram gained between two samples; the value before it where it gained none. */
function gained(name, a, b) {
  const from = a.histograms[name], to = b.histograms[name];
  const count = sum(to.counts) - sum(from.counts);
  return count > 0 ? (to.sum - from.sum) / count : null;
}

/** [seconds before now, value] of neighbouring samples. */
function series(value) {
  const points = [];
  for (let index = 1; index < samples.length; index++) {
    const point = value(samples[index - 1], samples[index]);
    if (point !== null) points.push([seen.at - samples[index].at, point]);
  }
  return points;
}

function chart(id, points, above) {
  const svg = byId(id), width = 120, height = 50;
  const span = Math.min(HISTORY_S, Math.max(30, seen.at - samples[0].at));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const top = 1.15 * Math.max(1e-9, ...points.concat(above || []).map(([, value]) => value));
  svg.replaceChildren();
  for (const [row, kind] of [[above, " second"], [points, ""]]) {
    if (!row || row.length < 2) continue;
    const spots = row.map(([age, value]) =>
      `${(width * (1 - age / span)).toFixed(2)},${(height - 1 - (height - 4) * value / top).toFixed(2)}`);
    const start = spots[0].split(",")[0], end = spots.at(-1).split(",")[0];
    const area = document.createElementNS(SVG, "polygon");
    area.setAttribute("class", `area${kind}`);
    area.setAttribute("points", `${start},${height} ${spots.join(" ")} ${end},${height}`);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("class", `line${kind}`);
    line.setAttribute("points", spots.join(" "));
    svg.append(area, line);
  }
}

// ---- KV blocks ----------------------------------------------------------------------------------

const STATES = ["free", "used", "shared", "cached"];
let shownBlocks = null;

function drawBlocks(data) {
  show("kv-usage", `${tenth.format(100 * data.numbers.kv_cache_usage_perc)} % in use`);
  const blocks = data.engine && data.engine.blocks;
  if (blocks) shownBlocks = blocks;
  if (!shownBlocks) return;
  const total = sum(shownBlocks.counts);
  show("kv-size", `of ${whole.format(total)} blocks of ${data.block_size} tokens`);
  STATES.forEach((name, index) => show(`n-${name}`, whole.format(shownBlocks.counts[index])));
  show("per-cell", shownBlocks.per_cell > 1
    ? `one square is ${shownBlocks.per_cell} blocks` : "one square is one block");
  paintBlocks();
}

function paintBlocks() {
  if (!shownBlocks) return;
  const canvas = byId("blocks"), width = canvas.clientWidth, { cells, per_cell: each } = shownBlocks;
  const kinds = STATES.length, count = each === 1 ? cells.length : cells.length / kinds;
  if (!width || !count) return;
  let size = 15;
  while (size > 5 && Math.ceil(count / Math.floor(width / size)) * size > 190) size--;
  const columns = Math.min(Math.floor(width / size), Math.max(count, 24));
  size = Math.min(width / columns, 18); // the whole width is used
  const height = Math.ceil(count / columns) * size;
  const ratio = window.devicePixelRatio || 1, gap = size > 8 ? 2 : 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d"), style = getComputedStyle(canvas);
  const colours = STATES.map((name) => style.getPropertyValue(`--${name}`).trim());
  paint.scale(ratio, ratio);
  for (let cell = 0; cell < count; cell++) {
    const x = Math.round((cell % columns) * size * ratio) / ratio;
    const y = Math.round(Math.floor(cell / columns) * size * ratio) / ratio, side = size - gap;
    if (each === 1) {
      square(paint, colours[Number(cells[cell])], x, y, side, side);
      continue;
    }
    const row = cells.slice(cell * kinds, (cell + 1) * kinds), all = sum(row) || 1;
    let at = 0;
    for (const index of [1, 2, 3, 0]) { // in use at the bottom
      const part = side * row[index] / all;
      square(paint, colours[index], x, y + side - at - part, side, part);
      at += part;
    }
  }
}

function square(paint, colour, x, y, width, height) {
  if (height <= 0) return;
  paint.fillStyle = colour;
  paint.beginPath();
  if (width > 8 && height === width) paint.roundRect(x, y, width, height, 2.5);
  else paint.rect(x, y, width, height);
  paint.fill();
}
new ResizeObserver(paintBlocks).observe(byId("blocks"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintBlocks);

// ---- steps --------------------------------------------------------------------------------------

const PHASES = ["schedule", "prepare", "forward", "sample", "commit"];

function drawPhases() {
  const now = samples.at(-1);
  let before = earlier(10);
  const steps = (sample) => sum(sample.histograms.iteration_tokens_total.counts);
  let made = steps(now) - steps(before);
  const rateNow = now.at > before.at ? made / (now.at - before.at) : 0;
  if (made <= 0) { before = null; made = steps(now); }
  const spent = PHASES.map((name) => now.numbers.step_phase_seconds[name]
    - (before ? before.numbers.step_phase_seconds[name] : 0));
  const all = sum(spent);
  show("step-rate", !made ? "no step yet" : before
    ? `${rateText(rateNow)} steps/s, ${secondsText(all / made)} each`
    : `${secondsText(all / made)} each since the start`);
  const bar = byId("phases"), legend = byId("phase-legend");
  if (!bar.children.length) {
    PHASES.forEach((name, index) => {
      bar.append(element("i", `p${index}`));
      const item = element("li");
      item.append(element("i", `key p${index}`), `${name} `, element("b", "", "–"));
      legend.append(item);
    });
  }
  spent.forEach((seconds, index) => {
    bar.children[index].style.flexGrow = all > 0 ? String(seconds / all) : "0";
    const text = all > 0 ? `${tenth.format(100 * seconds / all)} %` : "–";
    legend.children[index].querySelector("b").textContent = text;
  });
}

// ---- requests -----------------------------------------------------------------------------------

function drawRequests(data) {
  const engine = data.engine;
  if (!engine) return;
  const rows = engine.live.map((one) => [one.request_id, one.index, one.state,
    whole.format(one.num_prompt), "", `${whole.format(one.num_output)} / ${whole.format(one.max_tokens)}`,
    "", secondsText(one.age)]);
  for (const one of engine.recent) {
    rows.push([one.request_id, one.index, one.finish_reason, whole.format(one.num_prompt),
      whole.format(one.num_cached), whole.format(one.num_output),
      one.first_token === null ? "–" : secondsText(one.first_token - one.arrival),
      secondsText(one.finished - one.arrival)]);
  }
  const body = byId("requests");
  if (!rows.length) return;
  const focused = document.activeElement && document.activeElement.dataset.request;
  body.replaceChildren(...rows.slice(0, 24).map(requestRow));
  if (focused) {
    const again = [...body.querySelectorAll("button")].find((b) => b.dataset.request === focused);
    if (again) again.focus();
  }
}

function requestRow([id, index, word, ...numbers]) {
  const row = element("tr"), name = element("td"), kind = element("td");
  const button = element("button", "mono", shortName(id));
  button.type = "button";
  button.title = `Timeline of ${id}`;
  button.dataset.request = `${id} ${index}`;
  button.addEventListener("click", () => showTimeline(id));
  name.append(button);
  if (index) name.append(element("span", "choice", ` choice ${index}`));
  kind.append(element("span", `badge ${word}`, word));
  row.append(name, kind, ...numbers.map((text) => element("td", "num", text)));
  return row;
}

/** Without the kind of answer before an id, and the number after it; random ids by their beginning. */
function shortName(id) {
  const name = id.replace(/^(chatcmpl|cmpl|resp)-/, "").replace(/-\d+$/, "");
  return /^[0-9a-f]{32}$/.test(name) ? name.slice(0, 10) : name;
}

async function showTimeline(id) {
  const list = byId("timeline");
  show("timeline-id", id);
  list.replaceChildren(element("li", "", "loading"));
  byId("timeline-dialog").showModal();
  try {
    const answer = await ask(`debug/requests/${encodeURIComponent(id)}`);
    if (!answer.ok) {
      list.replaceChildren(element("li", "", await errorText(answer)));
      return;
    }
    const { events } = await answer.json();
    list.replaceChildren(...events.map((event) => timelineEntry(event, events[0].at)));
  } catch {
    list.replaceChildren(element("li", "", "The server does not answer."));
  }
}

function timelineEntry({ at, event, until, index, ...facts }, start) {
  const item = element("li");
  const what = until > at ? `${event} for ${secondsText(until - at)}` : event;
  item.append(element("span", "when", `+ ${secondsText(at - start)}`), element("span", "what", what));
  const words = Object.entries(facts).filter(([, value]) => value !== null)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  if (index) words.unshift(`choice ${index}`);
  if (words.length) item.append(element("span", "facts", words.join(", ")));
  return item;
}
byId("timeline-close").addEventListener("click", () => byId("timeline-dialog").close());

// ---- chat ---------------------------------------------------------------------------------------

let conversation = [], running = null;
const log = byId("log"), greeting = log.firstElementChild;

byId("temperature").addEventListener("input", () =>
  show("temperature-shown", Number(byId("temperature").value).toFixed(1)));

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (text && !running) send(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running && running.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
});
byId("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation = [];
  log.replaceChildren(greeting);
  byId("clear").hidden = true;
  byId("prompt").focus();
});

function bubble(kind, text = "") {
  const message = element("div", `message ${kind}`), body = element("div", "text", text);
  message.append(body);
  if (greeting.isConnected) greeting.remove();
  log.append(message);
  log.scrollTop = log.scrollHeight;
  return { message, body };
}

function busy(controller) {
  running = controller;
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
}

async function send(text) {
  const system = byId("system").value.trim(), limit = Number(byId("max-tokens").value);
  const mine = conversation;
  mine.push({ role: "user", content: text });
  byId("prompt").value = "";
  byId("clear").hidden = false;
  bubble("user", text);
  const { message, body } = bubble("assistant streaming");
  const controller = new AbortController();
  busy(controller);
  const reply = { text: "", tokens: 0, reason: null, started: performance.now(), first: null };
  let failure = null;
  try {
    const request = {
      messages: system ? [{ role: "system", content: system }, ...mine] : mine,
      temperature: Number(byId("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (seen) request.model = seen.models[0];
    if (limit >= 1) request.max_tokens = Math.floor(limit);
    const answer = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request),
      signal: controller.signal,
    });
    if (!answer.ok) failure = await errorText(answer);
    else failure = await read(answer.body, reply, body);
  } catch (error) {
    if (controller.signal.aborted) reply.reason = "stopped";
    else failure = "The connection was lost.";
  }
  message.classList.remove("streaming");
  if (reply.text) mine.push({ role: "assistant", content: reply.text });
  if (reply.text || !failure) message.append(element("div", "meta", metaText(reply)));
  else message.remove();
  if (failure) {
    if (!reply.text) mine.pop();
    bubble("error", failure);
  }
  if (!running || running === controller) busy(null);
  byId("prompt").focus();
}

/** Where a model's reasoning goes: above its answer. */
function thinking(body) {
  const before = body.previousElementSibling;
  if (before) return before;
  const made = element("div", "thinking");
  body.before(made);
  return made;
}

/** Follow a stream of events. Returns an error's message, or null. */
async function read(stream, reply, body) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return reply.reason ? null : "The answer was cut off.";
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) return event.error.message;
      if (event.usage) reply.tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        const { content: text, reasoning_content: thought } = choice.delta || {};
        if (text || thought) {
          if (reply.first === null) reply.first = performance.now();
          const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
          if (thought) thinking(body).append(thought);
          if (text) {
            reply.text += text;
            body.append(text);
          }
          if (atEnd) log.scrollTop = log.scrollHeight;
        }
        if (choice.finish_reason) reply.reason = choice.finish_reason;
      }
    }
  }
}

function metaText(reply) {
  const words = [];
  if (reply.tokens) words.push(`${whole.format(reply.tokens)} tokens`);
  if (reply.first !== null) {
    const spent = (performance.now() - reply.first) / 1e3;
    if (reply.tokens > 1) words.push(`${rateText((reply.tokens - 1) / Math.max(spent, 1e-3))} tokens/s`);
    words.push(`first after ${secondsText((reply.first - reply.started) / 1e3)}`);
  }
  if (reply.reason === "length") words.push("cut at max tokens");
  if (reply.reason === "stopped") words.push("stopped");
  return words.join(" · ") || "no text";
}

poll();
