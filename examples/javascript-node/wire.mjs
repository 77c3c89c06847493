// The wire of a fedbraid fleet (docs/fleet-wire.md and docs/wire-format.md): orders, chunks, frames.
import { createHash, verify } from "node:crypto";

export const CHUNK_BYTES = 512 * 1024;
const MAGIC = Buffer.from("fedbraid order 1\n");
const START = MAGIC.length + 64 + 4;
const ORDER_LIMIT = 512 * 1024, HEAD_LIMIT = 4096, CLOCK_TOLERANCE_MS = 30_000;
const FIELDS = "body,deadline,job,kind,model,node,run,serial";
const KINDS = ["FOLD", "HELLO", "LEAVE", "PING", "SUM", "TRAIN"];

export const digest = (bytes) => createHash("sha256").update(bytes).digest("hex");

// Reads orders: `accepted` (serial number -> deadline) guards against replays.
export function readOrder(message, operatorKey, node, accepted, now = Date.now()) {
  message = Buffer.from(message);
  if (message.length < START || message.length > ORDER_LIMIT || !message.subarray(0, MAGIC.length).equals(MAGIC)) {
    throw new Error("dropped a message that is not an order");
  }
  const signature = message.subarray(MAGIC.length, MAGIC.length + 64);
  const length = message.readUInt32BE(START - 4);
  const head = message.subarray(START, START + length), body = message.subarray(START + length);
  if (length > HEAD_LIMIT || head.length !== length) throw new Error("dropped a message that is not an order");
  if (!verify(null, Buffer.concat([MAGIC, head]), operatorKey, signature)) {
    throw new Error("dropped an order that the operator did not sign");
  }
  const order = JSON.parse(head.toString("utf8"));
  if (Object.keys(order).sort().join() !== FIELDS || !KINDS.includes(order.kind)) {
    throw new Error("dropped a signed order that cannot be read");
  }
  if (order.body !== digest(body)) throw new Error("dropped an order whose body is not the one that was signed");
  if (order.node !== node) throw new Error(`dropped an order for ${order.node}`);
  if (now > order.deadline + CLOCK_TOLERANCE_MS) throw new Error("dropped an order whose deadline passed");
  if (accepted.has(order.serial)) throw new Error("dropped an order that was delivered before");
  for (const [serial, until] of accepted) if (until < now - CLOCK_TOLERANCE_MS) accepted.delete(serial);
  accepted.set(order.serial, order.deadline);
  const [name, hash, size] = order.model ?? [];
  return { ...order, body, model: order.model && { name, digest: hash, size } };
}

export function chunks(message) {
  const count = Math.max(1, Math.ceil(message.length / CHUNK_BYTES));
  return Array.from({ length: count }, (_, k) => message.subarray(k * CHUNK_BYTES, (k + 1) * CHUNK_BYTES));
}

// [headers, body] of each chunk of an answer.
export function answerChunks(job, message) {
  const parts = chunks(message), hash = digest(message);
  return parts.map((part, k) => [{
    "Fb-Job": job, "Fb-Digest": hash, "Fb-Size": String(message.length), "Fb-Part": `${k}/${parts.length}`,
    "Nats-Msg-Id": `${job}.${hash.slice(0, 16)}.${k}`,
  }, part]);
}

// Where each chunk of a model is asked for.
export function modelRequests({ name, digest: hash, size }) {
  const count = Math.max(1, Math.ceil(size / CHUNK_BYTES));
  return Array.from({ length: count }, (_, k) => `$JS.API.DIRECT.GET.MODEL.fb.m.${name}.${hash.slice(0, 16)}.${k}`);
}

// An answer: the length of its head (4 bytes, big-endian), the head (JSON), the upload.
export function packAnswer(head, upload = Buffer.alloc(0)) {
  const text = Buffer.from(JSON.stringify(head)), length = Buffer.alloc(4);
  length.writeUInt32BE(text.length);
  return Buffer.concat([length, text, upload]);
}

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n >>> 0;
});

export function crc32(bytes) {
  let c = 0xffffffff;
  for (const byte of bytes) c = TABLE[(c ^ byte) & 255] ^ (c >>> 8);
  return (c ^ 0xffffffff) >>> 0;
}

// A frame of codec 0, identity: every number as float32, little-endian.
export function packFrame(vector, layout) {
  const frame = Buffer.alloc(20 + 4 * vector.length);
  frame.write("fB", 0, "latin1");
  frame.writeUInt8(1, 2);
  layout.copy(frame, 6, 0, 6);
  frame.writeUInt32LE(4 * vector.length, 12);
  vector.forEach((value, i) => frame.writeFloatLE(value, 16 + 4 * i));
  frame.writeUInt32LE(crc32(frame.subarray(0, frame.length - 4)), frame.length - 4);
  return frame;
}

// {vector, layout}: the numbers of such a frame, and the six bytes that name the model's layers.
export function readFrame(frame) {
  const length = frame.length - 20;
  const isSound = length >= 0 && length % 4 === 0 && frame.toString("latin1", 0, 2) === "fB" && frame.readUInt8(2) === 1
    && frame.readUInt8(3) === 0 && frame.readUInt32LE(12) === length
    && frame.readUInt32LE(frame.length - 4) === crc32(frame.subarray(0, frame.length - 4));
  if (!isSound) throw new Error("the model is not a frame of codec identity(); use an algorithm without codecs");
  const vector = Float32Array.from({ length: length / 4 }, (_, i) => frame.readFloatLE(16 + 4 * i));
  return { vector, layout: Buffer.from(frame.subarray(6, 12)) };
}
