//! Answers request lines and event lines: JSON objects on standard input, answers on standard output, one a line.

use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::process::ExitCode;

use kvhash::lines::{answer_line, answer_too_long, MAX_LINE_BYTES};

/// A line is read up to here: its end is not counted, so there is room for one.
const LIMIT: u64 = MAX_LINE_BYTES as u64 + 64;

fn run() -> io::Result<()> {
    let mut input = BufReader::with_capacity(1 << 16, io::stdin().lock());
    let mut output = BufWriter::new(io::stdout().lock());
    let mut line = Vec::new();
    loop {
        line.clear();
        if input.by_ref().take(LIMIT).read_until(b'\n', &mut line)? == 0 {
            return output.flush();
        }
        let answer = if line.len() as u64 == LIMIT && line.last() != Some(&b'\n') {
            skip_line(&mut input)?;
            Some(answer_too_long())
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

/// Pass over the rest of a line.
fn skip_line(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let buffer = input.fill_buf()?;
        let newline = buffer.iter().position(|byte| *byte == b'\n');
        let count = newline.map_or(buffer.len(), |at| at + 1);
        input.consume(count);
        if newline.is_some() || count == 0 {
            return Ok(());
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
