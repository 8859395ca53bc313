"""Other libraries' trainers and scripts, trained by Paceline. Each library is imported only when it is used."""
