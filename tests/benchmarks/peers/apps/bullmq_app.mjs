// BullMQ: completed jobs removed, many at once. `node bullmq_app.mjs work|single|bulk|paced|numbered|trickle [COUNT]`
import fs from 'node:fs'
import { Queue, Worker } from 'bullmq'

const { hostname: host, port } = new URL(process.env.BENCH_REDIS)
const connection = { host, port: Number(port) }
const PAYLOAD = 'x'.repeat(100)
const RATE = 200
const now = () => process.hrtime.bigint() // CLOCK_MONOTONIC, as everybody's here

// As tally.py does it.
const runs = process.env.BENCH_RUNS
function note (number) {
  const record = Buffer.alloc(16)
  record.writeBigInt64LE(number)
  record.writeBigInt64LE(now(), 8)
  if (number === BigInt(process.env.BENCH_VICTIM) && !fs.existsSync(`${runs}.killed`)) {
    fs.writeFileSync(`${runs}.killed`, record.subarray(8))
    process.kill(process.pid, 'SIGKILL')
  }
  fs.appendFileSync(runs, record)
}

if (process.argv[2] === 'work') {
  const tally = fs.openSync(process.env.BENCH_TALLY, 'r+')
  const late = fs.openSync(process.env.BENCH_LATE, 'a')
  const cell = Buffer.alloc(8)
  const delay = Buffer.alloc(8)
  let count = 0n
  new Worker('bench', async (job) => {
    cell.writeBigUInt64LE(++count)
    fs.writeSync(tally, cell, 0, 8, (process.pid % 4096) * 8)
    if (runs && job.data.payload[0] !== 'x') {
      note(BigInt(job.data.payload.slice(0, 20)))
    } else if (job.data.payload[0] !== 'x') {
      delay.writeBigInt64LE(now() - BigInt(job.data.payload.slice(0, 20)))
      fs.writeSync(late, delay)
    }
  }, { connection, concurrency: 100, removeOnComplete: { count: 0 } })
} else {
  const queue = new Queue('bench', { connection })
  const count = Number(process.argv[3]) - 1
  await queue.add('job', { payload: PAYLOAD })
  const began = now()
  if (process.argv[2] === 'bulk') {
    for (let sent = 0; sent < count; sent += 1000) {
      const many = Math.min(1000, count - sent)
      await queue.addBulk(Array.from({ length: many }, () => ({ name: 'job', data: { payload: PAYLOAD } })))
    }
  } else {
    for (let sent = 0; sent < count; sent++) {
      let payload = PAYLOAD
      if (process.argv[2] === 'paced') {
        const wait = Number(began - now()) / 1e6 + (sent * 1000) / RATE
        if (wait > 0) await new Promise((done) => setTimeout(done, wait))
        payload = String(now()).padStart(20, '0').padEnd(100, 'x')
      } else if (process.argv[2] === 'trickle') {
        await new Promise((done) => setTimeout(done, 1000))
      } else if (process.argv[2] === 'numbered') {
        payload = String(sent).padStart(20, '0').padEnd(100, 'x')
      }
      await queue.add('job', { payload })
    }
  }
  console.log(Number(now() - began) / 1e9)
  await queue.close()
}
