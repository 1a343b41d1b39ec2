//! Answers request lines: JSON objects on standard input, answers on standard output, one a line.

use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::process::ExitCode;

use kvhash::lines::{answer_line, answer_too_long, MAX_LINE_BYTES};

fn run() -> io::Result<()> {
    let mut input = BufReader::with_capacity(1 << 16, io::stdin().lock());
    let mut output = BufWriter::new(io::stdout().lock());
    let mut line = Vec::new();
    loop {
        line.clear();
        if input.by_ref().take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut line)? == 0 {
            return output.flush();
        }
        let answer = if line.len() > MAX_LINE_BYTES {
            let ended = line.last() == Some(&b'\n');
            let rest = if ended { 0 } else { skip_line(&mut input)? };
            Some(answer_too_long(line.len() as u64 + rest))
        } else {
            answer_line(&line)
        };
        if let Some(answer) = answer {
            output.write_all(answer.as_bytes())?;
            output.write_all(b"\n")?;
        }
        // Where no whole line waits, the asker may be waiting for these answers.
        if !input.buffer().contains(&b'\n') {
            output.flush()?;
        }
    }
}

/// Pass over the rest of a line; returns how many bytes it has.
fn skip_line(input: &mut impl BufRead) -> io::Result<u64> {
    let mut passed = 0;
    loop {
        let buffer = input.fill_buf()?;
        let newline = buffer.iter().position(|byte| *byte == b'\n');
        let count = newline.map_or(buffer.len(), |at| at + 1);
        input.consume(count);
        passed += count as u64;
        if newline.is_some() || count == 0 {
            return Ok(passed);
        }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvhash-lines: {error}");
            ExitCode::FAILURE
        }
    }
}
