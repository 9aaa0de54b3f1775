// Asks the head once a second what there is to see and shows it. Texts of users only ever become text.
import { Timeline, curve } from "./draw.js";

const EVERY_MS = 1000, TRY_AGAIN_MS = 1500, RATES_KEPT = 60, NO_LIMIT = 1e12;
const FRAME_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 200;
const $ = (id) => document.getElementById(id);
const timeline = new Timeline($("runs"), $("under"), $("legend"));
let seen = 0, offsetMs = 0, lastPage = null, goneSince = "", rates = [], before = null, painted = 0;

// --- words ---------------------------------------------------------------------------------------

const many = (value, one) => `${count(value)} ${one}${value === 1 ? "" : one.endsWith("s") ? "es" : "s"}`;
const count = (value) => Math.round(value).toLocaleString("en");
const share = (value) => value < 0 ? "" : `${Math.round(value * 100)} %`;
const pairs = (held) => Object.entries(held).map(([name, value]) => `${plain(name)} ${amount(name, value)}`).join(", ");
const plain = (name) => name.split("\u001f")[0];   // without the program that made it

function amount(name, value) {
  if (name === "memory") return bytes(value);
  return value === null || value >= NO_LIMIT ? "no limit" : `${+value.toFixed(4)}`;
}

function bytes(value) {
  for (const [power, unit] of [[30, "GiB"], [20, "MiB"], [10, "KiB"]])
    if (value >= 2 ** power) return `${+(value / 2 ** power).toPrecision(3)} ${unit}`;
  return `${value} B`;
}

function span(us) {
  if (us < 1000) return `${+us.toPrecision(3)} µs`;
  return us < 1e6 ? `${+(us / 1e3).toPrecision(3)} ms` : age(us / 1e6);
}

function age(seconds) {
  if (seconds < 0) return "";
  if (seconds < 120) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// --- elements ------------------------------------------------------------------------------------

function make(kind, text = "", name = "") {
  const element = document.createElement(kind);
  if (text !== "") element.textContent = text;
  if (name) element.className = name;
  return element;
}

function idButton(id, shown = id.slice(0, 12)) {
  const button = make("button", shown, "id");
  button.type = "button";
  button.title = "Tell its story";
  button.addEventListener("click", () => tellStory(id));
  return button;
}

// Rows that keep their elements while their key stays, so that focus and selections stay too.
// columns: [title, kind, value of a row]; kind: "number", "long", "main", "id" (a pair of id and text) or "".
function table(id, columns, rows, key, empty) {
  const element = $(id);
  if (!element.tBodies.length) {
    const head = element.createTHead().insertRow();
    for (const [title, kind] of columns) {
      const cell = make("th", title, kind === "number" ? "number" : "");
      cell.scope = "col";
      head.append(cell);
    }
    element.append(make("tbody"));
    element.kept = new Map();
  }
  const body = element.tBodies[0], kept = new Map();
  for (const row of rows.length ? rows : [null]) {
    let name = row === null ? "-empty-" : key(row);
    while (kept.has(name)) name += " again";
    const line = element.kept.get(name) || make("tr");
    element.kept.delete(name);
    kept.set(name, line);
    if (row === null) {
      if (!line.cells.length) line.append(Object.assign(make("td", empty, "empty"), { colSpan: columns.length }));
    } else columns.forEach(([title, kind, value], index) => fill(line, index, title, kind, value(row)));
    if (body.children[kept.size - 1] !== line) body.insertBefore(line, body.children[kept.size - 1] || null);
  }
  for (const line of element.kept.values()) line.remove();
  element.kept = kept;
}

function fill(line, index, title, kind, value) {
  let cell = line.cells[index];
  if (!cell) {
    cell = make("td", "", kind === "id" ? "" : kind);
    cell.dataset.label = title;
    line.append(cell);
  }
  const [text, id, tone] = Array.isArray(value) ? value : [value, "", ""];
  const is = `${text}\n${id || ""}\n${tone || ""}`;
  if (cell.is === is) return;
  cell.is = is;
  cell.replaceChildren(id ? idButton(id, text) : tone ? make("span", text, tone) : document.createTextNode(text));
}

const TONES = { alive: "good", dead: "bad", restarting: "warn", pending: "warn" };

// --- sections ------------------------------------------------------------------------------------

function tiles(page) {
  const totals = page.totals, done = (totals.counters.tasks_executed || 0) + (totals.counters.calls_executed || 0);
  if (before && page.now_ms > before.now)
    rates.push(Math.max(0, (done - before.done) / ((page.now_ms - before.now) / 1e3)));
  if (!before || page.now_ms > before.now) before = { now: page.now_ms, done };
  rates = rates.slice(-RATES_KEPT);
  const busy = Object.entries(totals.workers).map(([state, number]) => `${number} ${state}`).join(", ");
  const store = totals.store, tasks = totals.tasks, cpu = totals.resources.CPU || [0, 0];
  const shown = [
    ["tasks and calls a second", count(rates.at(-1) || 0), `${count(done)} ended`, "", curve(rates)],
    ["tasks under way", count(tasks.sent), `${count(tasks.ready)} want a slot, ${count(tasks.waiting)} want inputs`],
    ["nodes", count(totals.nodes), totals.silent ? `${totals.silent} give no answer` : many(totals.programs, "program"),
     totals.silent && "bad"],
    ["workers", count(Object.values(totals.workers).reduce((sum, number) => sum + number, 0)), busy],
    ["CPUs free", amount("CPU", cpu[1]), `of ${amount("CPU", cpu[0])}`],
    ["actors alive", count(totals.actors.alive || 0), many(totals.counters.actor_restarts || 0, "restart")],
    ["store used", bytes((store.used_bytes || 0) + (store.granted_bytes || 0)),
     `of ${bytes(store.limit_bytes || 0)}; ${bytes(store.disk_bytes || 0)} on disk`],
    ["retries, rebuilds", `${count(totals.counters.tasks_retried || 0)}, ${count(totals.counters.objects_rebuilt || 0)}`,
     `${many(totals.counters.workers_lost || 0, "worker")} lost`, totals.counters.workers_lost && "bad"],
  ];
  const box = $("tiles");
  shown.forEach(([title, value, under, kind, more], index) => {
    const tile = box.children[index] || box.appendChild(make("div", "", "tile"));
    const parts = [make("span", title), make("b", value), make("span", under, kind || "")];
    tile.replaceChildren(...parts, ...(more ? [more] : []));
  });
}

// Blocks that keep their elements, as rows of tables do.
function blocks(box, list, key, build, update, empty) {
  const old = box.kept || new Map(), kept = new Map();
  for (const one of list) {
    const block = old.get(key(one)) || build(one);
    old.delete(key(one));
    kept.set(key(one), block);
    update(block, one);
    if (box.children[kept.size - 1] !== block) box.insertBefore(block, box.children[kept.size - 1] || null);
  }
  for (const block of old.values()) block.remove();
  if (!list.length && !box.children.length) box.append(make("p", empty, "empty"));
  else if (list.length) box.querySelector(":scope > .empty")?.remove();
  box.kept = kept;
}

function facts(list, found) {
  list.replaceChildren(...found.filter(([, value]) => value !== "").map(([name, value]) => {
    const item = make("li", `${name} `);
    item.append(make("b", value));
    return item;
  }));
}

let nodeNumber = 0;

function buildNode(node) {
  const block = make("div", "", "node"), title = make("h3"), workers = make("table");
  workers.id = `workers-${nodeNumber++}`;
  workers.append(make("caption", `Workers of node ${node.node_id}`, "unseen"));
  title.append("node ", idButton(node.node_id, node.node_id), ` on ${node.host} `, make("span"));
  block.append(title, make("ul", "", "facts"), workers);
  return block;
}

function updateNode(block, node) {
  block.querySelector("h3 span").replaceChildren(make("span", node.answered ? "" : "no answer", "bad"));
  const free = Object.keys(node.total).filter((name) => name !== "memory")
    .map((name) => `${name} ${amount(name, node.available[name] || 0)} of ${amount(name, node.total[name])}`).join(", ");
  facts(block.querySelector("ul"), [["CPU used", share(node.cpu_share)],
    ["memory", node.memory_total_bytes ? `${bytes(node.memory_used_bytes)} of ${bytes(node.memory_total_bytes)}` : ""],
    ["free", free], ["slots asked for", count(node.queued)], ["programs", node.programs.map((pid) => `pid ${pid}`).join(", ")]]);
  const id = block.querySelector("table").id;
  if (!$(id)) $("node-list").append(block);
  table(id, [
    ["worker", "main", (one) => [one.worker_id, one.worker_id]],
    ["state", "", (one) => one.state],
    ["runs", "long", (one) => one.task ? [`${one.name || "task"} (attempt ${one.attempt})`, one.task] : one.actor],
    ["holds", "", (one) => pairs(one.holds)],
    ["pid", "number", (one) => one.pid || ""],
    ["CPU", "number", (one) => share(one.cpu_share)],
    ["memory", "number", (one) => one.memory_bytes ? bytes(one.memory_bytes) : ""],
  ], node.workers.slice(0, 200), (one) => one.worker_id, "no workers");
}

function nodes(page) {
  blocks($("node-list"), page.nodes, (node) => node.node_id, buildNode, updateNode, "no nodes");
  table("resource-table", [["resource", "main", (row) => row[0]], ["in all", "number", (row) => amount(row[0], row[1][0])],
    ["free", "number", (row) => amount(row[0], row[1][1])]], Object.entries(page.totals.resources), (row) => row[0], "none");
}

function made(page) {
  const where = (row) => row.nodes.join(", ") + (row.nodes_more ? ` and ${row.nodes_more} more` : "");
  $("made").hidden = !page.resources.length && !page.bundles.length;
  table("made-table", [["made at run time", "main", (row) => row.name], ["in all", "number", (row) => amount("", row.total)],
    ["free", "number", (row) => amount("", row.free)],
    ["on", "long", (row) => where(row) || ["no node has it yet", "", "warn"]]],
    page.resources, (row) => `${row.program} ${row.name}`, "nothing");
  table("bundle-table", [["gang or group", "main", (row) => row.id], ["kind", "", (row) => `${row.kind}, ${row.strategy}`],
    ["bundles", "number", (row) => row.bundles],
    ["state", "", (row) => row.whole ? ["reserved", "", "good"] : ["waits", "", "warn"]],
    ["on", "long", (row) => row.places.map((node, index) => `${index}: ${node || "?"}`).join(", ")],
    ["reason", "long", (row) => row.whole ? "" : row.reason]], page.bundles, (row) => row.id, "none");
}

function functions(page) {
  const number = (name) => (row) => row[name] ? count(row[name]) : "";
  table("function-table", [
    ["function", "main", (row) => row.name],
    ["waits for inputs", "number", number("waiting")], ["waits for a slot", "number", number("ready")],
    ["under way", "number", number("sent")], ["kept", "number", number("done")],
    ["runs", "number", number("runs")],
    ["failed runs", "number", (row) => row.failed_runs ? [count(row.failed_runs), "", "bad"] : ""],
    ["mean", "number", (row) => row.runs ? span(row.mean_us) : ""],
    ["longest", "number", (row) => row.runs ? span(row.longest_us) : ""],
  ], page.functions, (row) => row.name, "no tasks");
  const more = page.totals.tasks.unlooked;
  $("function-note").textContent = "Runs are counted while somebody looks, and up to 20,000 before. "
    + "Kept: ended tasks whose results may be made again."
    + (more ? ` ${count(more)} older tasks are not looked at here.` : "");
  table("queue-table", [
    ["asks for", "main", (row) => pairs(row.shape) || "nothing"], ["tasks", "number", (row) => count(row.count)],
    ["slots held", "number", (row) => row.leases || ""], ["where", "", (row) => row.placement.join(", ")],
    ["reason", "long", (row) => row.reason || "waits for its turn"]],
    page.queues, (row) => JSON.stringify([row.shape, row.placement, row.reason]), "nothing waits");
}

function actors(page) {
  const rest = (row) => [row.replaying ? `replays, ${row.replayed} calls so far` : "",
    row.saving ? "a checkpoint is being written" : "", row.unsaved ? `no checkpoint: ${row.unsaved}` : "", row.error]
    .filter(Boolean).join("; ");
  table("actor-table", [
    ["actor", "main", (row) => [row.named || row.name, row.id]],
    ["state", "", (row) => [row.state, "", TONES[row.state]]],
    ["lives on", "", (row) => row.node_id ? `${row.node_id}, worker ${row.worker}` : ""],
    ["for", "number", (row) => row.state === "dead" ? "" : age(row.alive_s)],
    ["calls", "number", (row) => row.calls < 0 ? "" : count(row.calls)],
    ["waiting", "number", (row) => row.waiting ? count(row.waiting) : ""],
    ["checkpoint after", "number", (row) => row.checkpoint_calls < 0 ? "" : `${count(row.checkpoint_calls)} calls`],
    ["restarts", "number", (row) => row.restarts || ""],
    ["recovery", "", (row) => row.recovery.replace("_", " ")],
    ["", "long", (row) => [rest(row), "", row.error || row.unsaved ? "bad" : "warn"]],
  ], page.actors, (row) => row.id, "no actors");
}

function buildGroup() {
  const block = make("div", "", "node");
  block.append(make("h3"), make("ul", "", "facts"), make("ul", "", "chips"), make("div"));
  return block;
}

function updateGroup(block, group) {
  block.querySelector("h3").textContent = group.name;
  const here = group.seats.filter((seat) => seat.state === "here").length;
  facts(block.querySelector(".facts"), [["members", `${here} of ${group.size}`], ["away", group.away],
    ["ledger on node", group.node_id], ["life", String(group.epoch)], ["on failure", group.on_failure]]);
  block.querySelector(".chips").replaceChildren(...group.seats.map((seat) =>
    make("li", `${seat.rank}: ${seat.host} pid ${seat.pid}${seat.state === "here" ? "" : `, ${seat.state}`}`, seat.state)));
  block.querySelector("div").replaceChildren(...group.steps.flatMap((step) => [
    make("p", `${step.text} (${step.state}, for ${age(step.age_s)})`), ...(step.course ? [make("pre", step.course)] : [])]),
    ...(group.steps.length ? [] : [make("p", "nothing under way", "empty")]));
}

function groups(page) {
  blocks($("group-list"), page.groups, (group) => `${group.node_id} ${group.name} ${group.formed}`, buildGroup,
    updateGroup, "no groups");
}

function buildStore(node) {
  const block = make("div"), bar = make("div", "", "bar");
  for (const kind of ["used", "granted", "pool"]) bar.append(make("i", "", kind));
  bar.setAttribute("role", "img");
  block.append(make("h3", `node ${node.node_id}`), make("ul", "", "facts"), bar);
  return block;
}

function updateStore(block, node) {
  const store = node.store, limit = store.limit_bytes || 1;
  facts(block.querySelector("ul"), [
    ["used", bytes(store.used_bytes || 0)], ["being written", bytes(store.granted_bytes || 0)],
    ["kept warm", bytes(store.pool_bytes || 0)], ["of", bytes(limit)], ["objects", count(store.objects || 0)],
    ["on disk", bytes(store.disk_bytes || 0)], ["spilled in all", bytes(node.spilled_bytes)]]);
  const bar = block.querySelector(".bar");
  for (const kind of ["used", "granted", "pool"])
    bar.querySelector(`.${kind}`).style.width = `${Math.min(100, 100 * (store[`${kind}_bytes`] || 0) / limit)}%`;
  bar.setAttribute("aria-label", `${share((store.used_bytes || 0) / limit)} of the store is used`);
}

function stores(page) {
  blocks($("store-list"), page.nodes.filter((node) => node.answered), (node) => node.node_id, buildStore, updateStore,
    "no store");
}

function failures(page) {
  const now = Date.now();
  table("failure-table", [
    ["when", "", (row) => new Date(now - row.age_s * 1e3).toLocaleTimeString()],
    ["what", "", (row) => row.kind],
    ["name", "main", (row) => [row.name || row.id.slice(0, 12), row.id]],
    ["", "long", (row) => row.text],
  ], page.failures, (row) => `${row.id} ${row.kind} ${row.text}`, "nothing failed lately");
}

function counters(page) {
  table("counter-table", [["counter", "main", (row) => row[0].replaceAll("_", " ")],
    ["sum", "number", (row) => row[0].startsWith("bytes") ? bytes(row[1]) : count(row[1])]],
    Object.entries(page.totals.counters).filter(([, value]) => value), (row) => row[0], "none yet");
}

// --- stories -------------------------------------------------------------------------------------

async function tellStory(id) {
  $("story-title").textContent = `Story of ${id}`;
  $("story-lines").textContent = "asking …";
  if (!$("story").open) $("story").showModal();
  try {
    const told = await ask(`api/story?id=${encodeURIComponent(id)}`);
    const known = (lastPage?.failures || []).filter((one) => one.id === id).map((one) => one.text);
    $("story-lines").textContent = [...known, ...told.lines].join("\n") || "Nobody remembers it any more.";
  } catch (error) {
    $("story-lines").textContent = `No answer: ${error.message}`;
  }
}

// Asked for by hand only: every process looks through all that it owns.
async function listObjects() {
  const found = $("largest").open ? await ask("api/objects").catch(() => null) : null;
  if (!found) return;
  const held = (row) => [row.refs && many(row.refs, "reference"), row.tasks && many(row.tasks, "task"),
    row.processes && many(row.processes, "other process"),
    row.lineage && "lineage"].filter(Boolean).join(", ");
  table("object-table", [["object", "main", (row) => [row.shown, row.id]], ["made by", "", (row) => row.name],
    ["size", "number", (row) => bytes(row.size_bytes)], ["where", "", (row) => [...new Set(row.places)].join(", ") || row.kind],
    ["owner", "", (row) => row.owner], ["held by", "long", held]], found.objects, (row) => row.id, "no objects");
}

// --- asking --------------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(8000) });
  if (answer.status === 403) throw new Error("the token does not hold any more: open the address that `flow page` tells");
  if (!answer.ok) throw new Error(`the head answers ${answer.status}`);
  return answer.json();
}

function say(kind, text) {
  $("status").className = kind;
  if ($("status").textContent !== text) $("status").textContent = text;
  document.body.classList.toggle("gone", kind === "gone");
}

function show(page) {
  if (lastPage && page.head.pid !== lastPage.head.pid) before = null;
  lastPage = page;
  document.title = `flowengine ${page.session}`;
  $("session").textContent = `session ${page.session}, head on ${page.head.host} for ${age(page.head.alive_s)}`;
  for (const section of [tiles, nodes, made, functions, actors, groups, stores, failures, counters]) section(page);
  timeline.turn(page.nodes, page.now_ms);
  timeline.legends();
}

async function look() {
  let wait = EVERY_MS;
  try {
    const page = await ask("api/now");
    if (lastPage && page.head.pid !== lastPage.head.pid) seen = 0;
    const found = await ask(`api/runs?since=${seen}`);
    if (!seen) timeline.clear();
    seen = found.number;
    timeline.add(found.runs);
    offsetMs = found.now_ms - performance.now();
    show(page);
    goneSince = "";
    say("live", "live");
  } catch (error) {
    goneSince ||= new Date().toLocaleTimeString();
    const why = error instanceof TypeError || error.name === "TimeoutError" ? "" : ` (${error.message})`;
    say("gone", `The head is gone or gives no answer since ${goneSince}${why}. Trying again …`);
    seen = 0;
    wait = TRY_AGAIN_MS;
  }
  if (document.hidden) document.addEventListener("visibilitychange", look, { once: true });
  else setTimeout(look, wait);
}

function paint(at) {
  if (lastPage && !goneSince && at - painted > FRAME_MS) {
    painted = at;
    timeline.draw(performance.now() + offsetMs);
  }
  requestAnimationFrame(paint);
}

$("largest").addEventListener("toggle", listObjects);
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname + location.hash);
look();
requestAnimationFrame(paint);
