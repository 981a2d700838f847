// Draws what the console's stream says. All text goes in as text, never as markup; nothing here writes anything anywhere.
"use strict";
const topics = { nodes: new Map(), sick: new Map(), waiting: new Map(), health: new Map(), decisions: new Map() };
const byId = (id) => document.getElementById(id);
let selected = "";
let drawn = "";
let nodeWanted = 0;

function make(tag, cls, ...inner) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  element.append(...inner.filter((part) => part !== ""));
  return element;
}

const style = (state) => (state === "healthy" ? "ok" : state === "unhealthy" || state === "exclude" ? "fail" : "warn");
const when = (time) => time.slice(0, 19).replace("T", " ");

function listen() {
  const stream = new EventSource("/api/stream");
  stream.addEventListener("snapshot", (event) => {
    Object.values(topics).forEach((topic) => topic.clear());
    take(event, new Set(Object.keys(topics)));
  });
  stream.addEventListener("changes", (event) => take(event, new Set()));
  stream.onopen = () => say("live", false);
  stream.onerror = () => {
    say("connection lost: what is shown may be old", true);
    // A browser does not come back by itself after an answer that is no stream (logged out, restarted, too many pages).
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

function say(text, isLost) {
  byId("link").textContent = text;
  byId("link").className = isLost ? "lost" : "";
}

function take(event, changed) {
  const touched = new Set();
  for (const { topic, key, value } of JSON.parse(event.data)) {
    topics[topic].delete(key);
    if (value !== null) topics[topic].set(key, value);
    changed.add(topic);
    if (topic === "nodes") touched.add(key);
    if (topic === "sick") touched.add(key.split("/")[0]);
  }
  if (changed.has("nodes")) showNodes();
  if (changed.has("sick")) show("sick-rows", "sick", sickRow, sickDetail);
  if (changed.has("waiting")) show("waiting-rows", "waiting", waitingRow, waitingDetail);
  if (changed.has("health")) show("health-rows", "health", healthRow, healthDetail);
  if (changed.has("decisions")) show("decision-rows", "decisions", decisionRow, decisionDetail);
  if (!topics.nodes.has(selected)) selected = [...topics.nodes.keys()].sort()[0] || "";
  if (selected !== drawn || touched.has(selected)) drawNode();
}

// Rebuilds a list and keeps the focus on the row of the same key; arrow keys move between rows, one of which is reached by Tab.
function fill(box, rows) {
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...rows);
  const target = rows.find((row) => row.dataset.key === focused) || null;
  const entry = target || rows.find((row) => row.getAttribute("aria-selected") === "true") || rows[0];
  rows.forEach((row) => { row.tabIndex = row === entry ? 0 : -1; });
  if (target) target.focus({ preventScroll: true });
}

function button(key, parts, open) {
  const row = make("button", "row", ...parts);
  row.type = "button";
  row.dataset.key = key;
  row.addEventListener("click", open);
  return row;
}

function arrows(box) {
  box.addEventListener("keydown", (event) => {
    const items = [...box.querySelectorAll("button")];
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (at < 0 || to === undefined || !items[to]) return;
    event.preventDefault();
    items[at].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
  });
}

function show(box, topic, row, detail) {
  const at = ([, value]) => value.time || "";
  const entries = [...topics[topic]].reverse().sort((left, right) => (at(left) < at(right) ? 1 : at(left) > at(right) ? -1 : 0));
  fill(byId(box), entries.map(([key, value]) => button(key, row(value), () => openDetail(...detail(value)))));
}

function showNodes() {
  const names = [...topics.nodes.keys()].sort();
  if (!topics.nodes.has(selected)) selected = names[0] || "";
  const totals = new Map();
  fill(byId("nodes"), names.map((name) => {
    const lines = topics.nodes.get(name).classes.map((kind) => {
      const sum = totals.get(kind.class) || { total: 0, free: 0, held: 0, sick: 0 };
      for (const field of Object.keys(sum)) sum[field] += kind[field];
      totals.set(kind.class, sum);
      return make("span", kind.sick ? "fail" : "faint", `${kind.class} ${kind.free} free, ${kind.held} held of ${kind.total}${kind.sick ? `, ${kind.sick} not well` : ""}`);
    });
    const row = button(name, [make("strong", "", name), ...lines], () => { selected = name; showNodes(); drawNode(); });
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(name === selected));
    return row;
  }));
  byId("totals").textContent = [`${names.length} node${names.length === 1 ? "" : "s"}`, ...[...totals].map(([kind, sum]) => `${kind} ${sum.free}/${sum.total} free${sum.sick ? `, ${sum.sick} not well` : ""}`)].join("  ·  ");
}

const bytes = (count) => `${Math.round(count / 1024 ** 3)} GiB`;

async function drawNode() {
  const name = selected;
  const number = ++nodeWanted;
  drawn = name;
  if (!name) return;
  let view;
  try {
    const answer = await fetch(`/api/nodes/${encodeURIComponent(name)}`);
    view = await answer.json();
  } catch { view = { error: "the console does not answer" }; }
  if (number !== nodeWanted) return;
  byId("node-title").textContent = `Node ${name}`;
  if (view.error) { byId("drawing").replaceChildren(make("p", "faint", view.error)); return; }
  const letter = (place) => (place < 26 ? String.fromCharCode(65 + place) : "#");
  const tree = (roots) => roots.map((root) => make("div", "", make("div", "faint mono", root.root || "no PCI address"), make("div", "tree", ...root.switches.flatMap((branch) => {
    const devices = branch.devices.map((device) => deviceButton(view, device, letter));
    return branch.switch ? [make("div", "faint mono", `switch ${branch.switch}`), make("div", "tree", ...devices)] : devices;
  }))));
  const panels = view.numa_nodes.filter((node) => node.cpus || node.roots.length).map((node) => {
    const cores = make("div", "cores", ...node.cores.map((core) => {
      const cell = make("span", `core${core.is_unfit ? " unfit" : core.holder >= 0 ? ` h${core.holder % 6}` : ""}`);
      cell.title = `cpu ${core.cpus.join(", ")}: ${core.is_unfit ? "not well" : core.holder >= 0 ? view.holders[core.holder].name : "free"}`;
      return cell;
    }));
    cores.setAttribute("aria-hidden", "true");
    return make("div", "panel", make("h3", "", `${node.socket === null ? "" : `socket ${node.socket} · `}NUMA node ${node.id}`), make("p", "faint", `${node.cpus} cpus, ${node.free_cpus} free · ${bytes(node.memory_bytes)}`), cores, ...tree(node.roots));
  });
  if (view.elsewhere.length) panels.push(make("div", "panel", make("h3", "", "NUMA node not told by the machine"), ...tree(view.elsewhere)));
  const legend = make("ul", "legend", ...view.holders.map((holder, place) => make("li", "", make("span", `sign h${place % 6}`, letter(place)), `${holder.name}: ${[...holder.devices, holder.cpus ? `cpus ${holder.cpus}` : ""].filter(Boolean).join(", ") || "nothing"}`)));
  const box = byId("drawing");
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(make("div", "numa", ...panels), legend, ...view.warnings.map((text) => make("p", "warn", `warning: ${text}`)));
  const devices = [...box.querySelectorAll("button")];
  const target = devices.find((device) => device.dataset.key === focused);
  devices.forEach((device) => { device.tabIndex = device === (target || devices[0]) ? 0 : -1; });
  if (target) target.focus({ preventScroll: true });
}

function deviceButton(view, device, letter) {
  const place = device.holders.length ? device.holders[0] : -1;
  const sign = make("span", `sign${place >= 0 ? ` h${place % 6}` : ""}`, place >= 0 ? letter(place) : "·");
  const state = device.state === "healthy" && device.is_allocatable ? "" : `  ${device.state}: ${device.reason}`;
  const row = make("button", "device", sign, device.name, make("span", "faint", ` ${device.model}`), state ? make("span", style(device.state === "healthy" ? "degraded" : device.state), state) : "");
  row.type = "button";
  row.dataset.key = `${device.class}/${device.name}`;
  const users = device.holders.map((at) => view.holders[at]);
  row.setAttribute("aria-label", `${device.name}, ${device.state}${device.reason ? `, ${device.reason}` : ""}, ${users.length ? `held by ${users.map((user) => user.name).join(", ")}` : "free"}`);
  row.addEventListener("click", () => {
    const sick = topics.sick.get(`${view.node}/${device.class}/${device.name}`);
    const names = [...new Set([...users.flatMap((user) => [user.name, ...user.pods]), ...(sick ? sick.users : [])])];
    openDetail(`${device.name} of ${view.node}`, [facts({ class: device.class, model: device.model, "PCI address": device.pci, "NUMA node": device.numa, state: device.state, reason: device.reason, message: device.message }), ...userList(names), ...conditions(device.conditions)]);
  });
  return row;
}

function facts(fields) {
  return make("table", "", make("tbody", "", ...Object.entries(fields).filter(([, value]) => value).map(([name, value]) => make("tr", "", make("th", "faint", name), make("td", "", String(value))))));
}
const userList = (names) => [make("h3", "", "Used by"), names.length ? make("ul", "", ...names.map((name) => make("li", "", name))) : make("p", "faint", "nobody")];
const conditions = (list) => list.flatMap((each) => [make("h3", "", each.reason), facts({ dimension: each.dimension, state: each.state, message: each.message, "to do": each.action === "none" ? "" : each.action, since: when(each.since), ...each.evidence })]);
const reasonList = (title, list) => (list.length ? [make("h3", "", title), make("ul", "", ...list.map((reason) => make("li", "", `${reason.message} `, make("code", "faint", reason.code))))] : []);

const sickRow = (sick) => [make("strong", "", `${sick.node} / ${sick.device}`), make("span", style(sick.state), `${sick.state}: ${sick.reason}`), make("span", "faint", sick.users.length ? `affects ${sick.users.join(", ")}` : "affects nobody")];
const sickDetail = (sick) => [`${sick.device} of ${sick.node}`, [facts({ state: sick.state, reason: sick.reason, message: sick.message, "to do": sick.action === "none" ? "" : sick.action, since: when(sick.since) }), ...userList(sick.users), ...conditions(sick.conditions)]];
const waitingRow = (item) => [make("strong", "", `${item.kind} ${item.namespace}/${item.name}`), make("span", "warn", item.reason), make("span", "faint", item.message.slice(0, 200))];
const waitingDetail = (item) => [`${item.kind} ${item.namespace}/${item.name} waits`, [facts({ reason: item.reason, why: item.message, since: when(item.since) })]];
const healthRow = (event) => [make("strong", "", `${event.node} / ${event.device}`), make("span", style(event.state), `${event.previous ? `${event.previous} → ` : ""}${event.state}${event.reason ? `: ${event.reason}` : ""}`), make("span", "faint", when(event.time))];
const healthDetail = (event) => [`${event.device} of ${event.node}`, [facts({ time: when(event.time), was: event.previous, is: event.state, reason: event.reason, message: event.message }), ...userList(event.users)]];
const decisionRow = (event) => [make("strong", "", `${event.verb} ${event.owner}${event.is_dry_run ? " (dry run)" : ""}`), make("span", event.is_refused ? "fail" : "ok", event.summary), make("span", "faint", `${when(event.time)} at ${event.node}`)];

function decisionDetail(event) {
  const parts = [facts({ decision: event.id, owner: event.owner, node: event.node, time: when(event.time), policy: event.policy, asked: event.asked.map((ask) => `${ask.container || "claim"}: ${ask.wants || "nothing"}`).join("; "), answer: event.summary })];
  for (const container of event.containers) {
    parts.push(make("h3", "", `Container ${container.container}`));
    parts.push(make("table", "", make("thead", "", make("tr", "", make("th", "", "resource"), make("th", "", "hints (* preferred)"))), make("tbody", "", ...container.hints.map((list) => make("tr", "", make("td", "mono", list.resource), make("td", "mono", list.hints === null ? "no opinion" : list.hints.join(" ") || "cannot be satisfied"))))));
    parts.push(facts({ "merged hint": container.merged, "NUMA nodes touched": container.numa, cpus: container.cpus, ...Object.fromEntries(Object.entries(container.devices).map(([kind, names]) => [kind, names.join(", ")])) }));
    parts.push(...reasonList("Why", container.reasons));
  }
  parts.push(...reasonList("Why not", event.reasons), ...reasonList("What would have to be freed", event.to_free));
  return [`${event.verb} for ${event.owner}`, parts];
}

function openDetail(title, parts) {
  byId("detail-title").textContent = title;
  byId("detail-body").replaceChildren(...parts);
  if (!byId("detail").open) byId("detail").showModal();
}

for (const id of ["nodes", "drawing", "sick-rows", "waiting-rows", "health-rows", "decision-rows"]) arrows(byId(id));
listen();
