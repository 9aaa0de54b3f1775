// The pictures of the page: runs of tasks as bars over time, and small curves.

export const WINDOW_MS = 30000;
const ROW_PX = 14, GAP_PX = 3, LABEL_PX = 130, LABEL_NARROW_PX = 60, AXIS_PX = 18, THIN_PX = 2, ROWS_MAX = 200, LEGEND_MAX = 12;
const LANES_MAX = 8, OVERLAP_MS = 10;
const GOOD = ["done", "done again", "running", "lives"];
const SVG = "http://www.w3.org/2000/svg";

const hues = new Map();

// A colour for a function: hues far from one another in the order in which functions come, and from the red of failures.
export function colour(name, dark) {
  if (!hues.has(name)) hues.set(name, Math.round(40 + (170 + hues.size * 171.6) % 280));
  return `hsl(${hues.get(name)} ${dark ? "55% 58%" : "60% 45%"})`;
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

export class Timeline {
  constructor(canvas, under, legend) {
    this.canvas = canvas;
    this.under = under;
    this.legend = legend;
    this.said = under.textContent;
    this.runs = [];     // {at, long, name, node, worker, outcome, task, attempt}
    this.rows = [];     // [worker id, lane], in their order
    this.ends = new Map();   // worker id -> until when each of its lanes is taken
    this.open = [];
    this.boxes = [];
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { this.under.textContent = this.said; });
  }

  clear() {
    this.runs = [];
    this.ends.clear();
  }

  add(found) {
    found.sort((one, other) => one[0] - other[0]);
    for (const [at, long, name, node, worker, outcome, task, attempt] of found) {
      const lane = this.lane(worker, at);
      this.ends.get(worker)[lane] = at + long;
      this.runs.push({ at, long, name, node, worker, outcome, task, attempt, lane });
    }
  }

  // The first row of a worker that is free from then on.
  lane(worker, at) {
    if (!this.ends.has(worker)) this.ends.set(worker, [0]);
    const ends = this.ends.get(worker), free = ends.findIndex((end) => end <= at + OVERLAP_MS);
    return free >= 0 ? free : Math.min(ends.length, LANES_MAX - 1);
  }

  // now: the head's clock. Keeps what is still to be seen, and which workers have a row.
  turn(nodes, now) {
    this.runs = this.runs.filter((run) => run.at + run.long > now - WINDOW_MS);
    const rows = new Map();
    this.open = [];
    for (const node of nodes)
      for (const worker of node.workers) {
        if (worker.state !== "dying") rows.set(worker.worker_id, 0);
        if (worker.since_ms && now - worker.since_ms > 700)
          this.open.push({
            at: worker.since_ms, long: Infinity, name: worker.name || worker.actor || "task", node: node.node_id,
            worker: worker.worker_id, outcome: worker.name === worker.actor ? "lives" : "running",
            task: worker.task.slice(0, 12), attempt: worker.attempt,
            lane: worker.name === worker.actor ? 0 : this.lane(worker.worker_id, worker.since_ms) });
      }
    for (const run of [...this.runs, ...this.open]) rows.set(run.worker, Math.max(rows.get(run.worker) || 0, run.lane));
    this.rows = [...rows].flatMap(([id, last]) => Array.from({ length: last + 1 }, (_, lane) => [id, lane])).slice(0, ROWS_MAX);
  }

  draw(now) {
    const dark = isDark(), style = getComputedStyle(document.documentElement);
    const [ink, line, bad] = ["--soft", "--line", "--bad"].map((name) => style.getPropertyValue(name));
    const width = this.canvas.clientWidth, height = Math.max(1, this.rows.length) * (ROW_PX + GAP_PX) + AXIS_PX;
    const scale = window.devicePixelRatio || 1, label = width < 600 ? LABEL_NARROW_PX : LABEL_PX;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    const place = new Map(this.rows.map(([id, lane], index) => [`${id} ${lane}`, index * (ROW_PX + GAP_PX)]));
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const x = (at) => label + (width - label) * (1 - (now - at) / WINDOW_MS), bottom = height - AXIS_PX;
    pen.fillStyle = ink;
    for (const [id, lane] of this.rows)
      if (!lane) pen.fillText(width < 600 ? id.split(".").at(-1) : id, 0, place.get(`${id} 0`) + ROW_PX / 2, label - 6);
    for (let ago = 0; ago <= WINDOW_MS; ago += 5000) {
      pen.fillStyle = line;
      pen.fillRect(x(now - ago), 0, 1, bottom);
      pen.fillStyle = ink;
      pen.textAlign = ago ? "center" : "right";
      if (ago < WINDOW_MS) pen.fillText(ago ? `${-ago / 1000} s` : "now", x(now - ago), bottom + AXIS_PX / 2);
    }
    pen.textAlign = "left";
    this.boxes = [];
    for (const run of [...this.runs, ...this.open]) {
      const top = place.get(`${run.worker} ${run.lane}`);
      if (top === undefined) continue;
      const left = Math.max(label, x(run.at)), right = Math.min(width, x(Math.min(now, run.at + run.long)));
      if (right <= label) continue;
      const failed = !GOOD.includes(run.outcome), wide = Math.max(right - left, 1);
      const thin = run.outcome === "lives";   // an actor that runs no call
      pen.globalAlpha = run.outcome === "running" ? 0.6 : 1;
      pen.fillStyle = failed ? bad : colour(run.name, dark);
      pen.fillRect(left, thin ? top + ROW_PX / 2 : top, wide, thin ? THIN_PX : ROW_PX);
      pen.globalAlpha = 1;
      if (wide > 60 && !thin) {
        pen.save();
        pen.beginPath();
        pen.rect(left, top, wide, ROW_PX);
        pen.clip();
        pen.fillStyle = dark ? "#101418" : "#ffffff";
        pen.fillText(run.name, left + 4, top + ROW_PX / 2);
        pen.restore();
      }
      this.boxes.push([left, top, wide, run]);
    }
  }

  // The colours of what is seen most.
  legends() {
    const dark = isDark(), count = new Map();
    for (const run of [...this.runs, ...this.open]) count.set(run.name, (count.get(run.name) || 0) + 1);
    const names = [...count.keys()].sort((a, b) => count.get(b) - count.get(a)).slice(0, LEGEND_MAX).sort();
    if (this.legend.dataset.names === names.join("\n") + dark) return;
    this.legend.dataset.names = names.join("\n") + dark;
    this.legend.replaceChildren(...names.map((name) => {
      const item = document.createElement("li"), box = document.createElement("i");
      box.style.background = colour(name, dark);
      item.append(box, name);
      return item;
    }));
  }

  point(event) {
    const x = event.offsetX, y = event.offsetY;
    const hit = this.boxes.findLast(([left, top, wide]) =>
      x >= left - 2 && x <= left + wide + 2 && y >= top && y <= top + ROW_PX);
    if (!hit) { this.under.textContent = this.said; return; }
    const run = hit[3], took = run.long === Infinity ? run.outcome : `${run.outcome} after ${run.long.toLocaleString()} ms`;
    this.under.textContent = `${run.name} ${run.task}, attempt ${run.attempt}: ${took}; worker ${run.worker} of node ${run.node}`;
  }
}

// A curve of the last values, for a tile.
export function curve(values) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  const most = Math.max(...values, 1e-9);
  svg.setAttribute("viewBox", "0 0 60 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const from = 60 - values.length + 1;
  path.setAttribute("d", values.map((value, index) => `${index ? "L" : "M"}${from + index},${19 - 18 * value / most}`).join(""));
  svg.append(path);
  return svg;
}
