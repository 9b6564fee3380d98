// Asks the server for the same answer with and without drafts, shows both while they are written, and keeps them.
"use strict";

const [ask, said, gain, stop, history] = ["ask", "said", "gain", "stop", "history"].map(id => document.getElementById(id));
const {chat, target, drafts} = JSON.parse(document.getElementById("data").textContent); // chat false: texts to continue
const KEY = `specdec ${target} ${drafts}`; // of the answers in the tab's storage
const MAX_KEPT = 50;
let asking = new AbortController(); // cancels the requests under way
let kept = JSON.parse(sessionStorage.getItem(KEY) ?? "[]"); // {prompt, temperature, drafted, plain}: figures of each side

class Side {
  constructor(name) {
    this.section = document.getElementById(name);
    this.text = this.section.querySelector(".answer");
    this.text.replaceChildren();
    this.figures = {tokens: 0, rounds: 0, accepted: 0, drafted: 0, seconds: 0, pieces: []};
  }

  // Shows a piece of text. place: of an accepted draft in its round, or 0
  add([text, place]) {
    const piece = this.text.appendChild(document.createElement("span"));
    piece.textContent = text;
    if (place) piece.className = "d" + Math.min(4, place);
  }

  take(round) {
    const figures = this.figures;
    round.tokens.forEach((token, index) => {
      figures.pieces.push([token, index < round.accepted ? index + 1 : 0]);
      this.add(figures.pieces.at(-1));
    });
    figures.tokens += round.tokens.length;
    if (round.drafted === null) return;
    figures.rounds += 1;
    figures.accepted += round.accepted;
    figures.drafted += round.drafted;
    figures.seconds += round.milliseconds / 1000;
    this.describe();
  }

  describe() {
    const {tokens, rounds, accepted, drafted} = this.figures;
    const tau = drafted ? `, tau ${findTau(this.figures).toFixed(2)}, ${accepted} of ${drafted} drafts accepted` : "";
    this.section.querySelector(".figure").textContent = `${findRate(this.figures).toFixed(1)} tokens/s, ${tokens} tokens in ${rounds} rounds${tau}`;
  }

  show(figures) {
    this.figures = figures;
    figures.pieces.forEach(piece => this.add(piece));
    this.describe();
  }
}

// Figures of the rounds; the prompt and its first token are left out.
const findRate = figures => (figures.tokens - 1) / figures.seconds;
const findTau = figures => (figures.tokens - 1) / figures.rounds;
const findSpeedup = answer => findRate(answer.drafted) / findRate(answer.plain);
const join = figures => figures.pieces.map(([text]) => text).join("");

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

function say(sentence, kind, place = said) {
  place.textContent = sentence;
  place.className = "verdict " + kind;
}

// Says what the answers of a prompt show.
function conclude(answer) {
  const {drafted, plain, temperature} = answer, speedup = findSpeedup(answer);
  const same = join(drafted) === join(plain);
  const equal = temperature !== 0 ? "" : same ? " Both answers are the same." : " The answers differ: between logits that are nearly equal, rounding decides.";
  say(`${speedup.toFixed(2)} times as fast with drafts: ${findRate(drafted).toFixed(1)} against ${findRate(plain).toFixed(1)} tokens/s.${equal}`, speedup > 1 ? "yes" : "no");
}

// Shows the table of kept answers, and whether the gain is certain.
function list() {
  const [kind, sentence] = describeGain(kept.map(answer => ({prompt: answer.prompt, speedup: findSpeedup(answer)})));
  say(sentence, kind, gain);
  history.hidden = gain.hidden = !kept.length;
  history.querySelector("tbody").replaceChildren(...kept.map(answer => {
    const row = document.createElement("tr"), button = document.createElement("button");
    button.textContent = answer.prompt.length > 60 ? answer.prompt.slice(0, 60) + " ..." : answer.prompt;
    button.addEventListener("click", () => {
      asking.abort();
      for (const name of ["drafted", "plain"]) new Side(name).show(answer[name]);
      ask.elements.prompt.value = answer.prompt;
      conclude(answer);
    });
    row.insertCell().append(button);
    const {drafted, plain} = answer, figures = [findSpeedup(answer).toFixed(2), findRate(drafted).toFixed(1), findRate(plain).toFixed(1)];
    for (const figure of [...figures, findTau(drafted).toFixed(2), drafted.tokens, answer.temperature]) row.insertCell().textContent = figure;
    return row;
  }));
}

// Keeps an answer in the tab, or only in the page where the tab has no room.
function keep(answer) {
  kept = [answer, ...kept].slice(0, MAX_KEPT);
  try {
    sessionStorage.setItem(KEY, JSON.stringify(kept));
  } catch { /* the quota is used up */ }
  list();
}

ask.addEventListener("submit", async event => {
  event.preventDefault();
  asking.abort();
  const mine = asking = new AbortController();
  const {prompt, ...fields} = Object.fromEntries(new FormData(ask));
  const body = {...(chat ? {messages: [{role: "user", content: prompt}]} : {prompt}), stream: true, details: true};
  for (const [name, value] of Object.entries(fields)) if (value !== "") body[name] = Number(value);
  const sides = {drafted: new Side("drafted"), plain: new Side("plain")};
  say("Both are written, interleaved, a round each ...", "unsure");
  stop.disabled = false;
  try {
    await Promise.all(Object.entries(sides).map(([name, side]) => read({...body, speculate: name === "drafted"}, mine.signal, ({round}) => {
      if (round) side.take(round);
    })));
    const answer = {prompt, temperature: body.temperature ?? 1, drafted: sides.drafted.figures, plain: sides.plain.figures};
    if (answer.drafted.rounds && answer.plain.rounds) {
      conclude(answer);
      keep(answer);
    } else say("The answers ended with their first tokens.", "unsure");
  } catch (error) {
    if (mine !== asking) return;
    say(error.name === "AbortError" ? "Stopped." : error.message, "no");
    mine.abort();
  }
  stop.disabled = true;
});
stop.addEventListener("click", () => asking.abort());
document.getElementById("examples").addEventListener("click", event => {
  if (event.target.tagName !== "BUTTON") return;
  ask.elements.prompt.value = event.target.textContent;
  ask.requestSubmit();
});
document.getElementById("forget").addEventListener("click", () => {
  kept = [];
  sessionStorage.removeItem(KEY);
  list();
});
list();
// ?prompt=TEXT&max_tokens=32 fills the fields and asks at once.
const given = new URLSearchParams(location.search);
for (const [name, value] of given) if (ask.elements[name]) ask.elements[name].value = value;
if (given.has("prompt")) ask.requestSubmit();
