// Draws the console's stream. All text is inserted as text, never as markup. Nothing here writes to the bus.
"use strict";
const topics = { nodes: new Map(), free: new Map(), silent: new Map(), sick: new Map(), waiting: new Map(), repairs: new Map(), health: new Map(), decisions: new Map() };
const byId = (id) => document.getElementById(id);
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const COLOURS = 12;
// Nodes beyond which a list is searched rather than read.
const FEW_NODES = 8;
// A node's address is the page's with the node's name, so that it can be stored, sent, and returned to.
const PLACE = "#/nodes/";
let selected = nodeOfAddress();
let drawn = "";
let nodeWanted = 0;

function make(tag, cls, ...inner) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  element.append(...inner.filter((part) => part !== ""));
  return element;
}

function nodeOfAddress() {
  if (!location.hash.startsWith(PLACE)) return "";
  try { return decodeURIComponent(location.hash.slice(PLACE.length)); } catch { return ""; }
}

const style = (state) => (state === "healthy" ? "ok" : state === "unhealthy" || state === "exclude" ? "fail" : "warn");
// All times are of UTC, as the commands print them.
const when = (time) => (time ? `${time.slice(0, 19).replace("T", " ")} UTC` : "");

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
    // A browser does not connect again by itself after an answer that is no stream (logged out, restarted, too many pages).
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
    if (topic === "sick" || topic === "silent") touched.add(key.split("/")[0]);
  }
  if (changed.has("nodes")) showNodes();
  if (changed.has("free")) fill(byId("free-rows"), [...topics.free].sort().map(([key, value]) => button(key, freeRow(value), () => openDetail(...freeDetail(value)))));
  if (changed.has("sick") || changed.has("silent")) showUnwell();
  if (changed.has("waiting")) show("waiting-rows", "waiting", waitingRow, waitingDetail);
  if (changed.has("repairs")) show("repair-rows", "repairs", repairRow, repairDetail);
  if (changed.has("health")) show("health-rows", "health", healthRow, healthDetail);
  if (changed.has("decisions")) show("decision-rows", "decisions", decisionRow, decisionDetail);
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

function sorted(topic) {
  const at = ([, value]) => value.time || "";
  return [...topics[topic]].reverse().sort((left, right) => (at(left) < at(right) ? 1 : at(left) > at(right) ? -1 : 0));
}

function show(box, topic, row, detail) {
  fill(byId(box), sorted(topic).map(([key, value]) => button(key, row(value), () => openDetail(...detail(value)))));
}

// Silent services first: they explain why so much else is unknown.
function showUnwell() {
  const silent = sorted("silent").map(([key, value]) => button(`silent/${key}`, silentRow(value), () => openDetail(...silentDetail(value))));
  const sick = sorted("sick").map(([key, value]) => button(key, sickRow(value), () => openDetail(...sickDetail(value))));
  fill(byId("sick-rows"), [...silent, ...sick]);
}

// Unhealthy nodes first, then those with a class that has nothing free, then by name with its numbers as numbers.
const isFull = (kind) => kind.held > 0 && kind.free === 0;
const rank = (node) => (node.classes.some((kind) => kind.sick) ? 0 : node.silent.length ? 1 : node.classes.some(isFull) ? 2 : 3);
const states = (node) => [...(rank(node) === 0 ? ["sick"] : []), ...(node.silent.length ? ["silent"] : []), ...(node.classes.some(isFull) ? ["full"] : []), ...node.classes.map((kind) => kind.class)];

function showNodes() {
  const all = [...topics.nodes.entries()].sort(([left, a], [right, b]) => rank(a) - rank(b) || left.localeCompare(right, "en", { numeric: true }));
  if (!topics.nodes.has(selected)) selected = topics.nodes.has(nodeOfAddress()) ? nodeOfAddress() : all.length ? all[0][0] : "";
  const totals = new Map();
  for (const [, node] of all) {
    for (const kind of node.classes) {
      const sum = totals.get(kind.class) || { total: 0, free: 0, held: 0, sick: 0 };
      for (const field of Object.keys(sum)) sum[field] += kind[field];
      totals.set(kind.class, sum);
    }
  }
  byId("filter").hidden = all.length <= FEW_NODES;
  byId("nodes").classList.toggle("many", all.length > FEW_NODES);
  const words = byId("filter").hidden ? [] : byId("filter").value.toLowerCase().split(" ").filter(Boolean);
  const found = all.filter(([name, node]) => words.every((word) => name.toLowerCase().includes(word) || states(node).includes(word)));
  fill(byId("nodes"), found.map(([name, node]) => {
    const lines = node.classes.map((kind) => make("span", !kind.sick ? "faint" : node.silent.includes(kind.class) ? "warn" : "fail", `${kind.class} ${kind.free} free, ${kind.held} held of ${kind.total}${kind.sick ? `, ${kind.sick} not well` : ""}`));
    if (node.silent.length) lines.unshift(make("span", "warn", `? silent: ${node.silent.join(", ")}`));
    const row = button(name, [make("strong", "", name), ...lines], () => choose(name));
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", String(name === selected));
    return row;
  }));
  const count = words.length ? `${found.length} of ${all.length} nodes` : `${all.length} node${all.length === 1 ? "" : "s"}`;
  byId("totals").textContent = [count, ...[...totals].map(([kind, sum]) => `${kind} ${sum.free}/${sum.total} free${sum.sick ? `, ${sum.sick} not well` : ""}`)].join("  ·  ");
}

function choose(name) {
  selected = name;
  if (nodeOfAddress() !== name) location.hash = PLACE + encodeURIComponent(name);
  showNodes();
  if (selected !== drawn) drawNode();
}

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
  byId("node-title").append(make("span", "faint", ` ${view.summary}`));
  const groups = view.sockets.map((panels) => make("div", "socket", ...panels.map((panel) => drawPanel(view, panel))));
  const parts = [make("div", view.sockets.length === 2 ? "numa sockets" : "numa", ...groups)];
  if (view.elsewhere) parts.push(drawPanel(view, view.elsewhere));
  if (view.memory_only) parts.push(make("p", "faint", view.memory_only));
  parts.push(make("ul", "legend", ...view.holders.map((holder) => make("li", "", ownerButton(view, holder)))));
  parts.push(make("p", "faint signs", "· free, ! unhealthy, ? unknown, r recovering, ~ degraded, - withheld; a small letter: one thread of the core; *: two owners"));
  if (view.distances) parts.push(make("p", "faint", view.distances));
  parts.push(...view.warnings.map((text) => make("p", "warn", `warning: ${text}`)));
  const box = byId("drawing");
  const focused = box.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  box.replaceChildren(...parts);
  const devices = [...box.querySelectorAll("button")];
  const target = devices.find((device) => device.dataset.key === focused);
  devices.forEach((device) => { device.tabIndex = device === (target || devices[0]) ? 0 : -1; });
  if (target) target.focus({ preventScroll: true });
}

// By the letter, so that two owners have the same colour only when their letters are twelve apart.
function colour(held) {
  if (held.colour < 0) return "";
  const place = LETTERS.indexOf((held.letter || held.sign).toUpperCase());
  return `h${(place < 0 ? held.colour : place) % COLOURS}`;
}

function ownerButton(view, holder) {
  const entry = make("button", "owner", make("span", `sign ${colour(holder)}`, holder.letter), `${holder.name}: ${holder.holds}`);
  entry.type = "button";
  entry.dataset.key = `owner/${holder.letter}`;
  entry.addEventListener("click", () => {
    const places = [view.elsewhere, ...view.sockets.flat()].filter(Boolean);
    const devices = places.flatMap((place) => place.roots.flatMap((root) => root.switches.flatMap((branch) => branch.devices.flatMap((device) => [device, ...(device.parts || [])]))));
    const own = devices.filter((device) => device.users && device.users.includes(holder.name));
    const decision = topics.decisions.get(holder.decision);
    openDetail(`${holder.name} on ${view.node}`, [
      facts({ holds: holder.holds, decision: decision ? "" : holder.decision }),
      ...(own.length ? [make("h3", "", "Devices"), make("ul", "", ...own.map((device) => make("li", device.is_well ? "" : "warn", `${device.name}${device.model ? `, ${device.model}` : ""}${device.is_well ? "" : `: ${device.state}, ${device.reason}`}`)))] : []),
      ...(decision ? [make("h3", "", "How it came to that"), ...decisionDetail(decision)[1]] : []),
    ]);
  });
  return entry;
}

function drawPanel(view, panel) {
  const lines = [make("h3", "", panel.title)];
  if (panel.cpus) {
    const cores = make("div", "cores", ...panel.cores.map((group) => make("span", "cache", ...group.map((core) => {
      const cell = make("span", `core ${core.is_sick ? "unfit" : colour(core)}`, core.sign);
      cell.title = core.text;
      return cell;
    }))));
    // A screen reader has the counts above and the owners' CPUs below the drawing.
    cores.setAttribute("aria-hidden", "true");
    lines.push(fact("cpus", panel.cpus), cores);
    if (panel.caches) lines.push(fact("L3", panel.caches));
  }
  return make("div", "panel", ...lines, ...(panel.memory ? [fact("memory", panel.memory)] : []), ...tree(view, panel.roots));
}

const fact = (name, text) => make("p", "fact", make("span", "faint", name), ` ${text}`);

const tree = (view, roots) => roots.map((root) => make("div", "", make("div", "branch", root.title), make("div", "tree", ...root.switches.flatMap((branch) => {
  const devices = branch.devices.flatMap((device) => drawDevice(view, device));
  return branch.title ? [make("div", "branch", branch.title), make("div", "tree", ...devices)] : devices;
}))));

function drawDevice(view, device) {
  if (!device.is_offered) return [make("div", "device kept", make("span", "sign", " "), device.name, make("span", "faint", ` ${device.text}`))];
  // Of many virtual functions, those with a holder and the unhealthy ones are shown. The device's details have all.
  const parts = device.parts.filter((part) => part.users.length || !part.is_well);
  const drawn = [deviceButton(view, device)];
  if (parts.length) drawn.push(make("div", "tree", ...parts.map((part) => deviceButton(view, part))));
  return drawn;
}

function deviceButton(view, device) {
  const sign = make("span", `sign ${colour(device)}`, device.sign);
  const looks = device.is_well ? "faint" : style(device.state === "healthy" ? "degraded" : device.state);
  const text = device.is_well || device.state !== "healthy" ? device.text : `${device.text}: ${device.reason}`;
  const row = make("button", "device", sign, make("span", `mark ${looks}`, device.mark), device.name, make("span", looks, ` ${text}`));
  row.type = "button";
  row.dataset.key = `${device.class}/${device.name}`;
  row.setAttribute("aria-label", `${device.name}, ${device.state}${device.reason ? `, ${device.reason}` : ""}, ${device.users.length ? `held by ${device.users.join(", ")}` : "free"}`);
  row.addEventListener("click", () => {
    const sick = topics.sick.get(`${view.node}/${device.class}/${device.name}`);
    const names = [...new Set([...device.users, ...(sick ? sick.users : [])])];
    const parts = device.parts || [];
    openDetail(`${device.name} of ${view.node}`, [
      facts({ class: device.class, model: device.model, "PCI address": device.pci, "NUMA node": device.numa, state: device.state, ...(device.conditions.length ? {} : { reason: device.reason, message: device.message }) }),
      ...userList(names), ...conditions(device.conditions),
      ...(parts.length ? [make("h3", "", "Parts"), make("ul", "", ...parts.map((part) => make("li", part.is_well ? "" : "warn", `${part.name}: ${part.is_well ? "" : `${part.state}, ${part.reason}; `}${part.users.join(", ") || "free"}`)))] : []),
    ]);
  });
  return row;
}

function facts(fields) {
  return make("table", "", make("tbody", "", ...Object.entries(fields).filter(([, value]) => value).map(([name, value]) => make("tr", "", make("th", "faint", name), make("td", "", String(value))))));
}
const userList = (names) => [make("h3", "", "Used by"), names.length ? make("ul", "", ...names.map((name) => make("li", "", name))) : make("p", "faint", "nobody")];
const conditions = (list) => list.flatMap((each) => [make("h3", "", each.reason), facts({ dimension: each.dimension, state: each.state, message: each.message, "to do": each.action === "none" ? "" : each.action, since: when(each.since), ...each.evidence })]);
const reasonList = (title, list) => (list.length ? [make("h3", "", title), make("ul", "", ...list.map((reason) => make("li", "", `${reason.message} `, make("code", "faint", reason.code))))] : []);

const freeText = (kind) => `${kind.free} free of ${kind.total}${kind.others === "-" ? "" : `: ${kind.others}`}`;
const freeRow = (sum) => [make("strong", "", sum.class), make("span", sum.free ? "ok" : "warn", freeText(sum)), make("span", "faint", sum.free ? `together: ${sum.together}` : "")];
// The nodes with the most free devices first.
function freeDetail(sum) {
  const nodes = [...topics.nodes].flatMap(([name, node]) => node.classes.filter((kind) => kind.class === sum.class).map((kind) => [name, kind]));
  nodes.sort(([left, a], [right, b]) => b.free - a.free || left.localeCompare(right, "en", { numeric: true }));
  const rows = nodes.map(([name, kind]) => make("tr", "", make("th", "", name), make("td", kind.free ? "" : "faint", freeText(kind)), make("td", "", kind.together)));
  const heads = make("thead", "", make("tr", "", ...["node", "devices", "free together"].map((text) => make("th", "faint", text))));
  return [`Free of class ${sum.class}`, [facts({ devices: freeText(sum), nodes: sum.nodes, "free together": sum.together }), make("table", "", heads, make("tbody", "", ...rows))]];
}
const silentRow = (silent) => [make("strong", "", silent.node ? `${silent.node} / ${silent.service} service` : silent.service), make("span", "warn", `? silent since ${when(silent.since) || "its start"}`), make("span", "faint", silent.message)];
const silentDetail = (silent) => [`${silent.service}${silent.node ? ` of ${silent.node}` : ""} is silent`, [facts({ service: silent.service, since: when(silent.since), "what follows": silent.message, "to do": "see whether it runs on this node: topobus doctor" })]];
const sickRow = (sick) => [make("strong", "", `${sick.node} / ${sick.device}`), make("span", style(sick.state), sick.conditions.length ? `${sick.state}: ${sick.reason}` : sick.message), make("span", "faint", sick.users.length ? `affects ${sick.users.join(", ")}` : "affects nobody")];
const sickDetail = (sick) => [`${sick.device} of ${sick.node}`, [facts({ model: sick.model, "PCI address": sick.pci, "NUMA node": sick.numa, state: sick.state, since: when(sick.since), ...(sick.conditions.length ? {} : { reason: sick.reason, message: sick.message }) }), ...userList(sick.users), ...conditions(sick.conditions)]];
const waitingRow = (item) => [make("strong", "", `${item.kind} ${item.namespace}/${item.name}`), make("span", "warn", item.reason), make("span", "faint", item.message.length > 200 ? `${item.message.slice(0, 199)}…` : item.message)];
const waitingDetail = (item) => [`${item.kind} ${item.namespace}/${item.name} waits`, [facts({ reason: item.reason, why: item.message, since: when(item.since) }), ...(item.users.length ? userList(item.users) : [])]];
const repairRow = (repair) => [make("strong", "", `${repair.node} / ${repair.device}`), make("span", repair.is_left ? "fail" : "warn", repair.now), make("span", "faint", repair.why)];
const repairDetail = (repair) => [`Repair of ${repair.device} of ${repair.node}`, [facts({ rule: repair.rule, evidence: repair.reasons, now: repair.now, since: when(repair.since), why: repair.why, "to do": repair.now === "gave-up" ? "look at it, then topobus device forgive, or return" : "" })]];
const healthRow = (event) => [make("strong", "", `${event.node} / ${event.device}`), make("span", style(event.state), `${event.previous ? `${event.previous} → ` : ""}${event.state}${event.reason ? `: ${event.reason}` : ""}`), make("span", "faint", when(event.time))];
// The device as it is now, if it is still unhealthy, and the event's report of it.
function healthDetail(event) {
  const now = topics.sick.get(`${event.node}/${event.class}/${event.device}`);
  const said = facts({ time: when(event.time), was: event.previous, is: event.state, reason: event.reason, message: event.message });
  return [`${event.device} of ${event.node}`, now ? [...sickDetail(now)[1], make("h3", "", "This event"), said] : [said, ...userList(event.users)]];
}
const decisionRow = (event) => [make("strong", "", `${event.text}${event.is_dry_run ? " (dry run)" : ""}`), make("span", event.is_refused ? "fail" : "ok", event.summary), make("span", "faint", `${when(event.time)}${event.node === "_" ? "" : ` at ${event.node}`}`)];

function decisionDetail(event) {
  const parts = [facts({ decision: event.id, owner: event.owner, node: event.node === "_" ? "" : event.node, time: when(event.time), policy: event.policy, asked: event.asked.map((ask) => `${ask.container || "claim"}: ${ask.wants || "nothing"}`).join("; "), answer: event.summary })];
  for (const container of event.containers) {
    parts.push(make("h3", "", `Container ${container.container}`));
    if (container.hints.length) parts.push(make("table", "", make("thead", "", make("tr", "", make("th", "", "resource"), make("th", "", "hints (* preferred)"))), make("tbody", "", ...container.hints.map((list) => make("tr", "", make("td", "mono", list.resource), make("td", "mono", list.hints === null ? "no opinion" : list.hints.join(" ") || "cannot be satisfied"))))));
    parts.push(facts({ "merged hint": container.merged, "NUMA nodes touched": container.numa, cpus: container.cpus, ...Object.fromEntries(Object.entries(container.devices).map(([kind, names]) => [kind, names.join(", ")])) }));
    parts.push(...reasonList("Why", container.reasons));
  }
  parts.push(...reasonList("Why not", event.reasons), ...reasonList("What would have to be freed", event.to_free));
  return [event.text, parts];
}

function openDetail(title, parts) {
  byId("detail-title").textContent = title;
  byId("detail-body").replaceChildren(...parts);
  if (!byId("detail").open) byId("detail").showModal();
}

byId("filter").addEventListener("input", showNodes);
addEventListener("hashchange", () => {
  // The link to the drawing is an anchor of the page, not a node's address.
  if (location.hash && !location.hash.startsWith(PLACE)) return;
  selected = nodeOfAddress();
  showNodes();
  if (selected !== drawn) drawNode();
});
for (const id of ["nodes", "drawing", "free-rows", "sick-rows", "waiting-rows", "repair-rows", "health-rows", "decision-rows"]) arrows(byId(id));
listen();
