// A node of a fedbraid fleet: softmax regression, full-batch gradient descent, on a JSON file of its data.
//   node client.mjs tls://HOST:4222 node-7.nk data.json      (ca.crt and operator.pub lie beside the key)
// data.json: {"inputs": [[…], …], "targets": [class, …], "classes": 10, "steps": 5, "lr": 0.1}
import { createPublicKey } from "node:crypto";
import { readFileSync, statSync } from "node:fs";
import { dirname, join } from "node:path";
import { connect, headers, nkeyAuthenticator } from "@nats-io/transport-node";
import { answerChunks, digest, modelRequests, packAnswer, packFrame, readFrame, readOrder } from "./wire.mjs";

const WINDOW = 4, TIMEOUT_MS = 10_000;

// One local training: (the update x − y, mean loss). Parameters: weight [classes, features], then bias [classes].
function train(x, { inputs, targets, classes, steps, lr }) {
  const features = inputs[0].length, y = Float32Array.from(x);
  if (y.length !== classes * (features + 1)) throw new Error(`the model has ${y.length} parameters, the data ${features} features`);
  let loss = 0;
  for (let step = 0; step < steps; step++) {
    const gradient = new Float64Array(y.length);
    for (let n = 0; n < inputs.length; n++) {
      const scores = new Float64Array(classes);
      for (let c = 0; c < classes; c++) {
        scores[c] = y[classes * features + c];
        for (let j = 0; j < features; j++) scores[c] += y[c * features + j] * inputs[n][j];
      }
      const top = Math.max(...scores), sum = scores.reduce((total, s) => total + Math.exp(s - top), 0);
      loss += (Math.log(sum) + top - scores[targets[n]]) / inputs.length;
      for (let c = 0; c < classes; c++) {
        const g = (Math.exp(scores[c] - top) / sum - (c === targets[n] ? 1 : 0)) / inputs.length;
        for (let j = 0; j < features; j++) gradient[c * features + j] += g * inputs[n][j];
        gradient[classes * features + c] += g;
      }
    }
    for (let i = 0; i < y.length; i++) y[i] -= lr * gradient[i];
  }
  return { update: x.map((value, i) => value - y[i]), loss: loss / steps };
}

class Node {
  constructor(connection, name, operatorKey, data) {
    Object.assign(this, { connection, name, operatorKey, data, accepted: new Map(), answers: new Map() });
  }

  async run() {
    for await (const message of this.connection.subscribe(`fb.o.${this.name}`)) {
      let order;
      try {
        order = readOrder(message.data, this.operatorKey, this.name, this.accepted);
      } catch (error) {
        console.error(error.message);
        continue;
      }
      try {
        await this.obey(order);
      } catch (error) {
        console.error(`${order.kind}: ${error.message}`);
      }
    }
  }

  async obey(order) {
    if (!this.answers.has(order.job)) {
      let answer;
      try {
        answer = await this.answerTo(order);
      } catch (error) {
        answer = packAnswer({ error: error.message });
      }
      this.answers.clear(); // the server has at most one job for a node
      this.answers.set(order.job, answer);
    }
    await this.store(order, this.answers.get(order.job));
  }

  async answerTo(order) {
    const body = order.body.length ? JSON.parse(order.body) : {};
    if (order.kind === "HELLO") return packAnswer({ samples: this.data.inputs.length, version: -1 });
    if (order.kind === "PING") return packAnswer({});
    if (order.kind === "LEAVE") return packAnswer({ lost: false });
    if (order.kind === "FOLD" || order.kind === "SUM" || /\bsecure\b/.test(body.settings.algorithm ?? "")) throw new Error("this client masks no uploads");
    const { vector, layout } = readFrame(await this.model(order));
    const { update, loss } = train(vector, this.data);
    if (body.base !== -1) throw new Error("this client holds no model; use a downlink that sends all of it");
    const head = { forgot: false, lost: false, loss, version: -1 };
    return packAnswer(head, packFrame(update, layout));
  }

  async model(order) {
    const parts = [];
    for (const subject of modelRequests(order.model)) {
      const found = await this.persist(order, async () => {
        const reply = await this.connection.request(subject, "", { timeout: TIMEOUT_MS });
        if (!reply.headers?.has("Nats-Sequence")) throw new Error("the model is not stored");
        return reply;
      });
      parts.push(Buffer.from(found.data));
    }
    const message = Buffer.concat(parts);
    if (digest(message) !== order.model.digest) throw new Error("the model is not the one that the operator signed");
    return message;
  }

  async store(order, message) {
    const waiting = answerChunks(order.job, message);
    const worker = async () => {
      for (let next = waiting.shift(); next; next = waiting.shift()) {
        const [about, part] = next, head = headers();
        for (const [key, value] of Object.entries(about)) head.set(key, value);
        await this.persist(order, async () => {
          const reply = await this.connection.request(`fb.r.${this.name}`, part, { headers: head, timeout: TIMEOUT_MS });
          const said = JSON.parse(reply.string());
          if (said.error) throw new Error(said.error.description);
        });
      }
    };
    await Promise.all(Array.from({ length: WINDOW }, worker));
  }

  // Until the order's deadline, with the same message id, which the broker stores once.
  async persist(order, attempt) {
    for (let pause = 200; ; pause = Math.min(2 * pause, 5000)) {
      try {
        return await attempt();
      } catch (error) {
        if (Date.now() > order.deadline || this.connection.isClosed()) throw error;
        await new Promise((done) => setTimeout(done, pause * (0.5 + Math.random() / 2)));
      }
    }
  }
}

async function main([server, keyFile, dataFile]) {
  if (!dataFile) throw new Error("usage: node client.mjs tls://HOST:4222 node-7.nk data.json");
  if (statSync(keyFile).mode & 0o077) throw new Error(`${keyFile} can be read by other users; use: chmod 600 ${keyFile}`);
  const [name, seed] = readFileSync(keyFile, "ascii").split(/\s+/);
  const folder = dirname(keyFile);
  const connection = await connect({
    servers: server, name, authenticator: nkeyAuthenticator(new TextEncoder().encode(seed)),
    tls: { caFile: join(folder, "ca.crt") }, inboxPrefix: `_INBOX.${name}`, maxReconnectAttempts: -1,
    pingInterval: 5000,
  });
  for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => connection.close());
  const operatorKey = createPublicKey(readFileSync(join(folder, "operator.pub")));
  console.error(`${name} is connected to ${server}`);
  await new Node(connection, name, operatorKey, JSON.parse(readFileSync(dataFile))).run();
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
