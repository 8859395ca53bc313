/* The other side of all_reduce.py: times MPI_Allreduce in place, float32 sums, for "BYTES TIMES" pairs of arguments.
   Worker 0 prints "BYTES SECONDS", the seconds of one operation on its clock, a line each. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (int at = 1; at + 1 < argc; at += 2) {
        long bytes = atol(argv[at]), times = atol(argv[at + 1]), count = bytes / (long)sizeof(float);
        float *data = malloc(bytes);
        for (long i = 0; i < count; i++) data[i] = 1;
        MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        for (long i = 0; i < count; i++) {
            if (data[i] != size) {
                fprintf(stderr, "worker %d: element %ld is %f\n", rank, i, data[i]);
                MPI_Abort(MPI_COMM_WORLD, 1);
            }
            data[i] = 0; /* zeros stay zeros, however often they are added */
        }
        MPI_Barrier(MPI_COMM_WORLD);
        double began = MPI_Wtime();
        for (long i = 0; i < times; i++)
            MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (rank == 0) printf("%ld %.9f\n", bytes, (MPI_Wtime() - began) / times);
        free(data);
    }
    MPI_Finalize();
    return 0;
}
