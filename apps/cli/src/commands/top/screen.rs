//! The terminal while the live view uses it.

use std::io::{self, Write, stdout};
use std::time::Duration;

use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use crossterm::style::{Attribute, Print, SetAttribute};
use crossterm::terminal::{
    Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode, size,
};
use crossterm::{cursor, queue};

use crate::failure::colors_wanted;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Nothing,
    Quit,
    /// The window was resized.
    Resized,
}

/// The terminal in full-screen mode; dropping it restores the terminal.
#[derive(Debug)]
pub struct Screen(());

impl Screen {
    /// Switches the terminal to full-screen mode.
    pub fn take() -> io::Result<Self> {
        enable_raw_mode()?;
        // From here on, dropping restores the terminal.
        let screen = Self(());
        queue!(stdout(), EnterAlternateScreen, cursor::Hide, DisableLineWrap)?;
        stdout().flush()?;
        Ok(screen)
    }

    /// Shows as many of these lines as fit, the first one highlighted.
    pub fn show(&self, lines: &[String]) -> io::Result<()> {
        let (columns, rows) = size()?;
        let mut out = stdout().lock();
        for (row, line) in (0..rows).zip(lines) {
            let line: String = line.chars().take(columns.into()).collect();
            queue!(out, cursor::MoveTo(0, row))?;
            if row == 0 && colors_wanted() {
                queue!(out, SetAttribute(Attribute::Bold), Print(line))?;
                queue!(out, SetAttribute(Attribute::Reset))?;
            } else {
                queue!(out, Print(line))?;
            }
            queue!(out, Clear(ClearType::UntilNewLine))?;
        }
        if let Ok(below) = u16::try_from(lines.len())
            && below < rows
        {
            queue!(out, cursor::MoveTo(0, below), Clear(ClearType::FromCursorDown))?;
        }
        out.flush()
    }

    /// Waits up to `time` for input.
    pub fn wait(&self, time: Duration) -> io::Result<Input> {
        if !event::poll(time)? {
            return Ok(Input::Nothing);
        }
        Ok(match event::read()? {
            Event::Key(key) if key.kind == KeyEventKind::Press => {
                let control = key.modifiers.contains(KeyModifiers::CONTROL);
                match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => Input::Quit,
                    KeyCode::Char('c') if control => Input::Quit,
                    _ => Input::Nothing,
                }
            }
            Event::Resize(..) => Input::Resized,
            _ => Input::Nothing,
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Ignore errors: the terminal may be gone.
        let _ = queue!(stdout(), EnableLineWrap, cursor::Show, LeaveAlternateScreen);
        let _ = stdout().flush();
        let _ = disable_raw_mode();
    }
}
