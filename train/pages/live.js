// Asks the server for the same answer with and without drafts, and shows both while they are written.
"use strict";

const ask = document.getElementById("ask"), stop = document.getElementById("stop"), said = document.getElementById("said");
const BARS = 120, WIDTH = 720, HEIGHT = 140;
const chat = JSON.parse(document.getElementById("data").textContent).chat; // false: prompts are texts to continue
let asking = null; // what cancels the requests under way

class Side {
  constructor(name) {
    this.section = document.getElementById(name);
    this.text = this.section.querySelector(".answer");
    this.text.replaceChildren();
    Object.assign(this, {tokens: 0, rounds: 0, accepted: 0, drafted: 0, seconds: 0, sizes: []});
    this.show();
  }

  // Tokens/s of the rounds; the prompt and its first token are left out.
  get rate() { return this.seconds ? (this.tokens - 1) / this.seconds : null; }

  take(round) {
    round.tokens.forEach((token, place) => {
      const piece = document.createElement("span");
      piece.textContent = token;
      if (place < round.accepted) piece.className = "d" + Math.min(4, place + 1);
      this.text.append(piece);
    });
    this.tokens += round.tokens.length;
    if (round.drafted !== null) {
      this.rounds += 1;
      this.accepted += round.accepted;
      this.drafted += round.drafted;
      this.seconds += round.milliseconds / 1000;
      this.sizes.push([round.drafted, round.accepted]);
    }
    this.show();
  }

  show() {
    const put = (name, text) => {
      const place = this.section.querySelector(`[data-figure=${name}]`);
      if (place) place.textContent = text;
    };
    put("rate", this.rate === null ? "-" : this.rate.toFixed(1));
    put("tokens", this.tokens || "-");
    put("rounds", this.rounds ? `in ${this.rounds} rounds` : "");
    put("tau", this.rounds ? ((this.tokens - 1) / this.rounds).toFixed(2) : "-");
    put("share", this.drafted ? `${this.accepted} of ${this.drafted} drafts accepted` : "");
  }
}

function showTree(tree) {
  const lines = document.createElement("ul");
  const lists = [lines];
  tree.tokens.forEach((token, node) => {
    const line = document.createElement("li"), mark = document.createElement(node && !tree.accepted.includes(node) ? "s" : "span");
    mark.textContent = JSON.stringify(token).slice(1, -1).replaceAll(" ", "\u00b7");
    if (node && tree.accepted.includes(node)) mark.className = "d2";
    line.append(mark);
    if (node) {
      const above = lists[tree.parents[node]];
      const list = above.querySelector(":scope > ul") ?? above.appendChild(document.createElement("ul"));
      list.append(line);
    } else {
      lines.append(line);
    }
    lists[node] = line;
  });
  document.getElementById("tree").replaceChildren(lines);
}

function showSizes(sizes) {
  const last = sizes.slice(-BARS), most = Math.max(4, ...last.map(([drafted]) => drafted));
  const bars = last.flatMap(([drafted, accepted], place) => [[drafted, "var(--d2)"], [accepted, "var(--good)"]].map(([num, colour]) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = num / most * (HEIGHT - 20);
    const at = {x: WIDTH - (last.length - place) * WIDTH / BARS, y: HEIGHT - height, width: WIDTH / BARS - 1, height};
    for (const [name, value] of Object.entries(at)) bar.setAttribute(name, value);
    bar.setAttribute("fill", colour);
    return bar;
  }));
  const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
  text.setAttribute("x", 4);
  text.setAttribute("y", 22);
  text.textContent = `${most} drafts`;
  document.getElementById("sizes").replaceChildren(text, ...bars);
}

// Calls `each` with every document of a stream of server-sent events.
async function read(body, signal, each) {
  const headers = {"Content-Type": "application/json"};
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {method: "POST", headers, body: JSON.stringify(body), signal});
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts.map(part => part.replace(/^data: /, ""))) {
      if (part === "[DONE]") continue;
      const document = JSON.parse(part);
      if (document.error) throw new Error(document.error.message);
      each(document);
    }
  }
}

function conclude(drafted, plain, greedy) {
  if (drafted.rate === null || plain.rate === null) return "The answers ended with their first tokens.";
  const speedup = drafted.rate / plain.rate, same = drafted.text.textContent === plain.text.textContent;
  const equal = !greedy ? "" : same ? " Both answers are the same." : " The answers differ: between logits that are nearly equal, rounding decides.";
  return `${speedup.toFixed(2)} times as fast with drafts: ${drafted.rate.toFixed(1)} against ${plain.rate.toFixed(1)} tokens/s.${equal}`;
}

ask.addEventListener("submit", async event => {
  event.preventDefault();
  const fields = Object.fromEntries(new FormData(ask));
  const asked = chat ? {messages: [{role: "user", content: fields.prompt}]} : {prompt: fields.prompt};
  const body = {...asked, stream: true, details: true};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (fields[name] !== "") body[name] = Number(fields[name]);
  const sides = {drafted: new Side("drafted"), plain: new Side("plain")};
  asking = new AbortController();
  stop.disabled = false;
  ask.querySelector("button").disabled = true;
  said.className = "verdict unsure";
  said.textContent = "Both are written, in turn, a round each ...";
  try {
    await Promise.all(Object.entries(sides).map(([name, side]) => read({...body, speculate: name === "drafted"}, asking.signal, document => {
      if (!document.round) return;
      side.take(document.round);
      if (name !== "drafted") return;
      if (document.round.tree) showTree(document.round.tree);
      showSizes(side.sizes);
    })));
    said.textContent = conclude(sides.drafted, sides.plain, body.temperature === 0);
    said.className = "verdict " + (sides.drafted.rate > sides.plain.rate ? "yes" : "no");
  } catch (error) {
    said.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    said.className = "verdict no";
    asking.abort();
  } finally {
    stop.disabled = true;
    ask.querySelector("button").disabled = false;
  }
});
stop.addEventListener("click", () => asking?.abort());
// ?prompt=TEXT&max_tokens=32 fills the fields and asks at once.
const given = new URLSearchParams(location.search);
for (const [name, value] of given) if (ask.elements[name]) ask.elements[name].value = value;
if (given.has("prompt")) ask.requestSubmit();
addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask.requestSubmit(); });
